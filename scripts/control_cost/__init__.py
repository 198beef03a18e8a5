"""What the control plane costs, stage by stage; `polychip bench control` is the way in."""
