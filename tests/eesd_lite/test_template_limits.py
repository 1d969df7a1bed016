"""Chat templates that would run for ever or take all memory are stopped in one line; whatever else fails is one too."""

from __future__ import annotations

import pytest

from eesd_lite import template_limits
from eesd_lite.errors import ModelError, PromptError
from eesd_lite.templates import ChatTemplate, TemplateLimitError

LONG = [{"role": "user", "content": "word " * 2000}]


def render(source: str) -> str:
    return ChatTemplate("own", source).render(LONG, special={})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) if loop.depth0 < 3 }}{% endfor %}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(40) }}",
    ],
)
def test_loops_and_calls_end_when_the_time_is_used_up(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.2)
    with pytest.raises(TemplateLimitError, match="is stopped: it runs for more than 0.2 s; try one of"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] * 10**7 }}",
        "{{ 10 ** (10 ** 6) }}",
        "{{ ([1] * 10**9) | length }}",
        "{{ ('x' * 100) | center(10**9) | length }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '%999999999d' % 5 }}{{ '{:999999999}'.format(5) }}",
        "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s %}{{ 'x' * 9999999 }}{% endset %}{% for a in range(9999) %}{{ s }}{% endfor %}",
        "{% set s = 'x' * 9999 %}{{ s | replace('x', s) }}",
        "{% set s = 'x' * 9999 %}{{ ([s] * 9999) | join }}",
        "{{ range(99999) | map('center', 99999) | list | length }}",
    ],
)
def test_huge_values_are_refused_before_they_take_the_memory(source: str) -> None:
    with pytest.raises(TemplateLimitError, match="the chat template 'own' is stopped: it "):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% include 'x' %}",
        "{{ strftime_now(5) }}",
        "{{ messages | tojson(indent='x', nothing=1) }}",
        "{{ range(3) | map('foo') | list }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_one_line(source: str) -> None:
    with pytest.raises((PromptError, ModelError)) as caught:
        render(source)
    assert "chat template" in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000, "{% generation %}", "\ud800"])
def test_a_template_that_cannot_be_read_is_one_line(source: str) -> None:
    with pytest.raises((PromptError, ModelError)) as caught:
        if render(source) == source:
            raise PromptError("chat template as it stands")  # a lone surrogate is text as good as any
    assert "chat template" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_what_real_templates_do_is_untouched() -> None:
    source = (
        "{% for m in messages %}{{ '[' ~ m.role + '] ' + m['content'] | trim }}{% if not loop.last %}|{% endif %}"
        "{{ loop.length }}{% endfor %}{% set s %}a{{ 1 + 1 }}{% endset %}{{ s }}{{ [1, 2] | tojson(indent=1) }}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in missing %}{% else %}none{% endfor %}"
    )
    assert render(source) == f"[user] {('word ' * 2000).strip()}1a2[\n 1,\n 2\n]a1none"
