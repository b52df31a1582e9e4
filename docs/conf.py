"""Sphinx's settings: ``make docs`` makes a site of all pages and of the docstrings.

The root of the sources is the tree's, so that pages link to one another as they do on GitHub.
"""

from __future__ import annotations

project = "Koinon"
author = "the Koinon authors"
project_copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "Koinon"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "compose/*.md"]

myst_heading_anchors = 4  # headings are linked to as on GitHub
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # pages that are shown on GitHub too begin as those do

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": True}
python_use_unqualified_type_names = True
