"""Group norms with an activation, found in programs; see ``primitive``."""
