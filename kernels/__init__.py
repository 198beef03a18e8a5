"""Operations: their specifications, the reference that defines them, and native implementations."""
