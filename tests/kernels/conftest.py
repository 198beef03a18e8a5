"""What every test of the kernels has."""

from tests.fakes.one_thread import one_thread as one_thread
