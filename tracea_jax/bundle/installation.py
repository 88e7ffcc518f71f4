"""Paths of libtracea, its headers and CMake files in the installed package."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The installed library.

    Attributes:
      root: its directory, which may be copied or moved as a whole.
    """

    root: pathlib.Path

    @classmethod
    def installed(cls) -> Library:
        """That of this package.

        Raises:
          FileNotFoundError: if the package was built without it.
        """
        library = cls(root=pathlib.Path(__file__).parent.parent / "capi")
        if not library.file.is_file():
            raise FileNotFoundError(
                f"{library.file} is missing: this tracea_jax has no libtracea; "
                "install the package again"
            )
        return library

    @property
    def include(self) -> pathlib.Path:
        """The directory of tracea.h and tracea.hpp."""
        return self.root / "include"

    @property
    def lib(self) -> pathlib.Path:
        """The directory of the library."""
        return self.root / "lib"

    @property
    def file(self) -> pathlib.Path:
        """The library itself."""
        return self.lib / "libtracea.so"

    @property
    def cmake(self) -> pathlib.Path:
        """The directory for CMake's ``tracea_DIR``."""
        return self.lib / "cmake" / "tracea"

    @property
    def pkgconfig(self) -> pathlib.Path:
        """The directory for ``PKG_CONFIG_PATH``."""
        return self.lib / "pkgconfig"

    @property
    def cflags(self) -> str:
        """For a compiler."""
        return f"-I{self.include}"

    @property
    def libs(self) -> str:
        """For a linker; programs find the library where it is now."""
        return f"-L{self.lib} -ltracea -Wl,-rpath,{self.lib}"
