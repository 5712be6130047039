"""The page is one file that names nothing outside of it, and what a model is called can do no harm in it."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser

from disco_accel.observe.step_facts import _StepFacts
from disco_accel.observe.step_folder import _Step, figures_of
from disco_accel.observe.step_model import step_model
from disco_accel.observe.step_page import _PAGE, SCRIPTS, page_of
from tests.observe import traced_step as small
from tests.observe.test_step_folder import STATS

EVIL = "</script><b onclick=x>@@SCRIPT@@ \u2028'\"&amp;"


def page() -> tuple[str, dict[str, object]]:
    facts = _StepFacts({small.W1: EVIL}, {small.A: EVIL})
    model = step_model(_Step(small.plan(), small.events(), facts, "measured", figures_of(STATS)))
    model["title"] = EVIL
    return page_of(model), model


class Parsed(HTMLParser):
    """Elements in their order, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.scripts:
            self.scripts[-1] += data


def test_hostile_names_stay_data() -> None:
    text, model = page()
    found = Parsed(text)
    assert not [tag for tag, _ in found.elements if tag == "b"]
    assert [tag for tag, _ in found.elements].count("script") == 2
    assert json.loads(found.scripts[0]) == json.loads(json.dumps(model)), "the model comes back to the letter"


def test_nothing_is_loaded_and_only_these_scripts_may_run() -> None:
    text, _ = page()
    found = Parsed(text)
    named = [attrs for _, attrs in found.elements if {"src", "href", "data", "action"} & attrs.keys()]
    assert [attrs.get("href") for attrs in named] == ["#timeline"]
    policy = next(a["content"] or "" for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


def test_the_vendored_files_are_those_that_the_readme_names() -> None:
    readme = (_PAGE / "README.md").read_text()
    named = dict(re.findall(r"`(vendor/[\w.]+)` \| `([0-9a-f]{64})`", readme))
    files = (_PAGE / "vendor").iterdir()
    there = {f"vendor/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert named == there and SCRIPTS[0] in named
