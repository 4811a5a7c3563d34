"""Pages from Jinja2 templates: each is one file that opens offline and fetches nothing.

The templates escape every value that they show (autoescape), and fail on names they do not know. A content
security policy lets no script run but the page's own. Styles and scripts are in `report/templates/`, too.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from meshwright import units
from meshwright.report import format as fmt


def render(template: str, **values: Any) -> Markup:
    """Return the HTML of a template in `report/templates/`, filled with `values`."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    loader = PackageLoader("meshwright.report")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def asset(name: str) -> Markup:
        return Markup(_bare(loader.get_source(environment, name)[0]))

    environment.globals |= {"asset": asset, "sha256": _sha256, "across": False}
    environment.filters |= {
        "fixed": fmt.fixed,
        "number": fmt.count,
        "percent": fmt.percent,
        "size": fmt.size,
        "short": fmt.short,
        "duration": fmt.duration,
        "value": fmt.value_text,
        "seconds": units.seconds,
        "gigabytes": units.gigabytes,
    }
    environment.tests["finite"] = fmt.is_number
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _bare(source: str) -> str:
    """Return a style or a script without indentation, empty lines and lines of comments."""
    lines = (line.strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("// ", "/* ")))


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _printable(value: Any) -> Any:
    """Make control characters visible and replace lone surrogates, in whatever is not HTML already."""
    if isinstance(value, Markup):
        return value
    shown = str(value).encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    visible = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in shown)
    return "".join("\ufffd" if 0x7F <= ord(c) < 0xA0 else c for c in visible)
