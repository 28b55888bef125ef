"""The pages of this folder as a site: ``make docs`` builds ``docs/_build/html``, and needs no network for it."""

import re
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import mezzo

project, author, release = "mezzo", "the mezzo developers", mezzo.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # as on GitHub: a link to page.md#a-heading leads to it in both places

html_theme, html_title = "furo", "mezzo"
html_static_path, html_css_files = ["_static"], ["mezzo.css"]
html_show_copyright = html_show_sourcelink = html_copy_source = False
html_show_search_summary = False  # browsers let no page that is a file fetch another
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "monokai"

autodoc_mock_imports = ["accelerate", "lightning", "transformers"]  # extras of their own, and large


class Unread(MetaPathFinder):
    """Lets nothing import what is mocked: while autodoc mocks nothing, sphinx looks for the source of base classes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse a module."""
        if name.partition(".")[0] in autodoc_mock_imports:
            raise ModuleNotFoundError(f"{name} is mocked", name=name)


sys.meta_path.insert(0, Unread())
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints, autodoc_typehints_format = "description", "short"
autodoc_typehints_description_target = "documented"
default_role = "code"
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_numpy_docstring = napoleon_use_rtype = False
napoleon_custom_sections = [("Cost", "notes_style")]


def contents(_: Any, page: str, source: list[str]) -> None:
    """Make the site's table of contents from the headings and links of ``index.md``, which stays plain markdown."""
    if page != "index":
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        pages = re.findall(r"\]\(([\w/-]+)\.(?:md|rst)\)", text)
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""])


def setup(app: Any) -> None:
    """Connect what is written here."""
    app.connect("source-read", contents)
