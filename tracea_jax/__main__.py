"""``python -m tracea_jax`` is ``tracea``."""

from tracea_jax.cli import main

raise SystemExit(main())
