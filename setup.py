"""The CPU kernels, compiled while the package is built; all else is in pyproject.toml.

They are optional: where they cannot be compiled the package is built without them, and they are
compiled on first use or not used. They are a plain library for ctypes, of no Python's own kind.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
FOLDER = "src/stretto/kernels"
recipe: dict[str, Any] = runpy.run_path(str(ROOT / FOLDER / "recipe.py"))


class BuildKernels(build_ext):
    """Compiles by the recipe that first use follows, too."""

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        return str(Path(*folders, recipe["library_name"](name)))

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        scratch = Path(self.build_temp, "kernels")
        for folder in (library.parent, scratch):
            folder.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # of an earlier build; this one may fail
        log = scratch.resolve() / "compile.log"
        try:
            compiler = recipe["compilers"]()[0]
            instructions = ext.name.rpartition(".")[2]
            recipe["compile_library"](compiler, instructions, scratch.resolve() / library.name, log)
        except recipe["CompileFailed"] as error:
            raise CompileError(f"the CPU kernels are left out: {error}") from error
        (scratch / library.name).replace(library)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the library does not depend on it."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def kernels() -> list[Extension]:
    if not recipe["is_for"](sysconfig.get_platform()):
        return []
    sources = sorted(str(path.relative_to(ROOT)) for path in recipe["SOURCES"].glob("*.[ch]*"))
    main = f"{FOLDER}/csrc/api.cpp"
    headers = [path for path in sources if path != main]
    return [
        Extension(f"stretto.kernels.{name}", [main], depends=headers, optional=True)
        for name in recipe["INSTRUCTIONS"]
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
