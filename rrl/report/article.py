"""One trajectory as HTML: the question, what came of it, what was rewarded, found and written.

All text of policies and passages is escaped: it may hold anything.
"""

import html
import itertools
import re
from collections.abc import Mapping, Sequence

from rrl.data.trajectory import ENVIRONMENT, NOT_FINITE, POLICY, PROMPT, Trajectory
from rrl.report.segments import RSEARCH_TAGS, Segment, segments_of, stray_tags
from rrl.text.normalize import title_key
from rrl.text.spans import Tag

ENDINGS = {
    "answer": "gave an answer",
    "turn_limit": "ran out of turns",
    "no_action": "neither searched nor answered",
    "search_limit": "ran out of searches",
    "context_limit": "ran out of context",
    "length": "ran out of tokens",
    "malformed": "broke the format",
    NOT_FINITE: "broke off: logits not finite",
    "stop": "stopped searching",
    "expanded": "expanded once",
}
CUTS = {
    "turn_tokens": "a turn cut at its most tokens",
    "context": "a turn cut where the context was full",
    "observation_tokens": "an observation cut at its most tokens",
    "room": "an observation or a prompt larger than the room left",
}
EXPECTED = ("answer", "stop", "expanded")
"""Endings that are no failure."""


HELD_OUT, TRAINING, UNUSED = "held out", "training", "training, not used (rewards hardly differ in its group)"
"""Where a trajectory of a run came from; only `TRAINING` carried loss."""


def article(
    trajectory: Trajectory,
    *,
    source: str = "",
    tags: Mapping[Tag, str] = RSEARCH_TAGS,
    token_bytes: Sequence[bytes] | None = None,
) -> str:
    """One trajectory as an HTML article, without style; `source` says where it came from, "" that nobody knows."""
    cut = segments_of(trajectory, tags, token_bytes)
    prompt = "".join(piece.text for piece in cut if piece.kind == "prompt")
    shown = "".join(_segment(piece, trajectory, tags) for piece in cut if piece.kind != "prompt")
    folded = f"<details><summary>prompt</summary><pre>{html.escape(prompt)}</pre></details>" if prompt else ""
    return (
        f"<article>{_head(trajectory, source)}<div class='panels'>{_rewards(trajectory)}{_searches(trajectory)}</div>"
        f"{_tokens(trajectory, source)}{folded}<div class='text'>{shown}</div></article>"
    )


def verdict(trajectory: Trajectory) -> str:
    """ "right" (exact match), "partly" (some F1), "wrong", or "unscored"."""
    if "em" not in trajectory.metrics:
        return "unscored"
    if trajectory.metrics["em"] >= 1:
        return "right"
    return "partly" if trajectory.metrics.get("f1", 0.0) > 0 else "wrong"


def _head(trajectory: Trajectory, source: str) -> str:
    state = verdict(trajectory)
    mark = {"right": "✓ right", "partly": "◐ partly right", "wrong": "✗ wrong", "unscored": "not scored"}[
        state
    ]
    chips = [f'<b class="chip {state}">{mark}</b>']
    if source:
        chips.append(f'<span class="chip">{words(source)}</span>')
    if trajectory.question.kind:
        chips.append(f'<span class="chip">{words(trajectory.question.kind)}</span>')
    ended = ENDINGS.get(trajectory.ended, trajectory.ended.replace("_", " "))
    chips.append(
        f'<span class="chip{"" if trajectory.ended in EXPECTED else " odd"}">{html.escape(ended)}</span>'
    )
    chips += [
        f'<span class="chip odd">{text}</span>'
        for limit, text in CUTS.items()
        if limit in {c[1] for c in trajectory.cuts}
    ]
    chips.append(
        f'<span class="quiet">question {html.escape(trajectory.question.id)} · group {trajectory.group} · '
        f"request {trajectory.request}</span>"
    )
    gold = " <i>or</i> ".join(html.escape(answer) for answer in trajectory.question.answers) or "–"
    facts = [("gold", f"<b>{gold}</b>"), ("answer", _said(trajectory.answer, f"<b class='{state}'>", "</b>"))]
    if trajectory.evidence or trajectory.reader_answer:
        facts.append(("reader, from the evidence alone", _said(trajectory.reader_answer)))
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    question = html.escape(trajectory.question.text)
    return f"<h2>{question}</h2><p class='chips'>{' '.join(chips)}</p><dl class='facts'>{rows}</dl>"


def _said(text: str, before: str = "", after: str = "") -> str:
    return f"{before}{html.escape(text)}{after}" if text.strip() else '<span class="quiet">none</span>'


def _rewards(trajectory: Trajectory) -> str:
    if not trajectory.rewards:
        return ""
    parts = [(name, value) for name, value in trajectory.rewards.items() if name != "total"]
    if "total" in trajectory.rewards:
        parts.append(("total", trajectory.rewards["total"]))
    longest = max([abs(value) for _, value in parts] + [1e-9])
    rows = "".join(
        f'<tr class="{"total" if name == "total" else ""}"><th>{words(name)}</th><td class="number">{value:.2f}</td>'
        f'<td class="gauge"><i class="{"minus" if value < 0 else ""}" style="width:{100 * abs(value) / longest:.0f}%">'
        "</i></td></tr>"
        for name, value in parts
    )
    scores = " · ".join(f"{words(name)} {_number(value)}" for name, value in trajectory.metrics.items())
    return f'<section><h3>reward</h3><table>{rows}</table><p class="quiet">{scores}</p></section>'


def _searches(trajectory: Trajectory) -> str:
    if not trajectory.searches:
        return '<section class="wide"><h3>searches</h3><p class="quiet">none was made</p></section>'
    gold = _gold(trajectory)
    seen: set[str] = set()
    rows = []
    for number, search in enumerate(trajectory.searches, start=1):
        titles = []
        for title in search.titles:
            key = title_key(title)
            style = "" if key not in gold else "gold again" if key in seen else "gold"
            seen.add(key)
            titles.append(f'<li><span class="{style}">{html.escape(title)}</span></li>')
        found = f"<ol>{''.join(titles)}</ol>" if titles else '<span class="quiet">nothing came back</span>'
        if search.failed:
            found = '<span class="chip wrong">retrieval failed</span>'
        rows.append(
            f'<tr><td class="number">{number}</td><th>{html.escape(search.query)}</th><td>{found}</td></tr>'
        )
    missed = [title for title in trajectory.question.gold if title_key(title) not in seen]
    note = ""
    if gold:
        note = f"{len(gold & seen)} of {len(gold)} gold passages found"
        if missed:
            note += "; never seen: " + ", ".join(html.escape(title) for title in missed)
    return f'<section class="wide"><h3>searches</h3><table>{"".join(rows)}</table><p class="quiet">{note}</p></section>'


def _tokens(trajectory: Trajectory, source: str) -> str:
    counts = {role: int((trajectory.roles == role).sum()) for role in (PROMPT, POLICY, ENVIRONMENT)}
    total = sum(counts.values())
    if not total:  # read from a file that has none
        return ""
    sampled = "sampled, trained on" if source == TRAINING else "sampled"
    names = {PROMPT: "prompt", POLICY: sampled, ENVIRONMENT: "environment"}
    parts = "".join(
        f'<i class="r{role}" style="flex-grow:{len(list(run))}"></i>'
        for role, run in itertools.groupby(trajectory.roles.tolist())
    )
    keys = " · ".join(
        f'<span class="key r{role}">{count} {names[role]}</span>' for role, count in counts.items()
    )
    return f'<div class="tokens"><div class="strip">{parts}</div><p class="quiet">{total} tokens: {keys}</p></div>'


def _segment(piece: Segment, trajectory: Trajectory, tags: Mapping[Tag, str]) -> str:
    origin = "sampled" if piece.role == POLICY else "given"
    label = f'<span class="label">{html.escape(piece.kind)}</span>' if piece.kind != "reasoning" else ""
    if piece.role != POLICY:
        text = _observation(piece.text, trajectory)
    elif piece.spans:
        text = "".join(_token(text, logp) for text, logp in piece.spans)
    elif piece.kind == "reasoning":
        text = _with_stray_tags(piece.text.strip(), tags)
    else:
        text = html.escape(piece.text.strip())
    return f'<div class="piece {piece.kind} {origin}">{label}<div class="words">{text}</div></div>'


def _token(text: str, logp: float) -> str:
    """A sampled token; the less likely it was, the stronger its underline (quantised, to keep pages small)."""
    level = min(int(-logp * 2), 6)
    return f'<t class="p{level}" title="{logp:.2f}">{html.escape(text)}</t>' if level else html.escape(text)


def _observation(text: str, trajectory: Trajectory) -> str:
    """An observation with its titles in bold, gold ones marked."""
    text = text.strip()
    titles = sorted(
        {title for search in trajectory.searches for title in search.titles}, key=len, reverse=True
    )
    if not titles:
        return html.escape(text)
    gold = _gold(trajectory)
    parts = re.split(rf"(\(Title: (?:{'|'.join(map(re.escape, titles))})\))", text)
    for at in range(1, len(parts), 2):
        title = parts[at][len("(Title: ") : -1]
        parts[at] = f'<b class="{"gold" if title_key(title) in gold else "title"}">{html.escape(title)}</b>'
    return "".join(part if at % 2 else html.escape(part) for at, part in enumerate(parts))


def _with_stray_tags(text: str, tags: Mapping[Tag, str]) -> str:
    out, end = [], 0
    for start, stop in stray_tags(text, tags):
        stray = f'<b class="stray" title="this tag is part of no well-formed box">{html.escape(text[start:stop])}</b>'
        out += [html.escape(text[end:start]), stray]
        end = stop
    return "".join([*out, html.escape(text[end:])])


def _gold(trajectory: Trajectory) -> set[str]:
    return {title_key(title) for title in trajectory.question.gold}


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.2f}"


def words(name: str) -> str:
    """A field's name as words, escaped."""
    return html.escape(name.replace("_", " "))
