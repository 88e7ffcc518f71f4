"""How Sphinx builds the site: sphinx-build -W docs build/site

The pages are Markdown (MyST) and notebooks with the outputs that they were saved with;
the reference comes from docstrings and from the command's own parser. What a page needs
when it is read (fonts, scripts, styles) is in the site. Code blocks of the pages are
run by ``tests/test_docs.py``, and not here.
"""

from __future__ import annotations

import pathlib
import sys

import tracea_jax

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_ext"))

project = "tracea_jax"
author = "the authors of tracea_jax"
version = release = tracea_jax.__version__
copyright = "the authors of tracea_jax, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_argparse_cli",
    "sphinx_copybutton",
    "sphinx_design",
    "docstrings",  # these are in _ext
    "links",
    "signatures",
]
exclude_patterns = ["_ext"]

# Pages: the same Markdown that a code host shows.
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # from another host

# The reference.
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # signatures.py has them
autodoc_mock_imports = ["flax", "equinox"]  # their models are named, and not used
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_custom_sections = [("Fields", "params_style")]  # see docstrings.py
nitpicky = True
python_maximum_signature_line_length = 88

html_theme = "sphinx_book_theme"
html_title = "tracea_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "navbar_persistent": [],
    "show_toc_level": 2,
}
copybutton_prompt_text = "$ "
