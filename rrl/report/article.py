"""Render one trajectory as HTML: question, outcome, rewards, searches and text. Read `article` first.

All text of policies and passages is escaped, because it may contain anything.
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
    NOT_FINITE: "stopped: logits not finite",
    "stop": "stopped searching",
    "expanded": "expanded once",
}
"""Text for each value of `Trajectory.ended`. "stop" and "expanded" are endings of R2AG's trees of searches."""
CUT_LABELS = {
    "turn_tokens": "a turn reached its token limit",
    "context": "a turn was cut because the context was full",
    "observation_tokens": "an observation was cut at its token limit",
    "room": "an observation or a prompt did not fit into the context",
}
"""Text for each limit in `Trajectory.cuts`, which has (turn, limit) for each limit that was reached."""
NORMAL_ENDINGS = ("answer", "stop", "expanded")
"""Endings that are not failures."""


HELD_OUT, TRAINING, UNUSED = "held out", "training", "training, not used (rewards hardly differ in its group)"
"""Where a run's trajectories come from. Only those of `TRAINING` contribute to the loss. In a group of `UNUSED` trajectories the
rewards are almost equal, so there is no signal for training."""


def article(
    trajectory: Trajectory,
    *,
    source: str = "",
    tags: Mapping[Tag, str] = RSEARCH_TAGS,
    token_bytes: Sequence[bytes] | None = None,
) -> str:
    """Return one trajectory as the HTML of an <article> element, without a style sheet.

    Args:
      trajectory: the trajectory.
      source: where it came from, such as `HELD_OUT`; "": not known.
      tags: the protocol's tags, as in `segments_of`.
      token_bytes: bytes of each token id; None: tokens are not marked by their log-probability.
    """
    segments = segments_of(trajectory, tags, token_bytes)
    prompt = "".join(segment.text for segment in segments if segment.kind == "prompt")
    body = "".join(_segment(segment, trajectory, tags) for segment in segments if segment.kind != "prompt")
    prompt_html = (
        f"<details><summary>prompt</summary><pre>{html.escape(prompt)}</pre></details>" if prompt else ""
    )
    return (
        f"<article>{_head(trajectory, source)}<div class='panels'>{_rewards(trajectory)}{_searches(trajectory)}</div>"
        f"{_tokens(trajectory, source)}{prompt_html}<div class='text'>{body}</div></article>"
    )


def correctness(trajectory: Trajectory) -> str:
    """Return "right" (exact match), "partly" (F1 above 0), "wrong" or "unscored"."""
    if "em" not in trajectory.metrics:
        return "unscored"
    if trajectory.metrics["em"] >= 1:
        return "right"
    return "partly" if trajectory.metrics.get("f1", 0.0) > 0 else "wrong"


def _head(trajectory: Trajectory, source: str) -> str:
    verdict = correctness(trajectory)
    verdict_text = {
        "right": "✓ right",
        "partly": "◐ partly right",
        "wrong": "✗ wrong",
        "unscored": "not scored",
    }[verdict]
    chips = [f'<b class="chip {verdict}">{verdict_text}</b>']
    if source:
        chips.append(f'<span class="chip">{in_words(source)}</span>')
    if trajectory.question.kind:
        chips.append(f'<span class="chip">{in_words(trajectory.question.kind)}</span>')
    ended = ENDINGS.get(trajectory.ended, trajectory.ended.replace("_", " "))
    chips.append(
        f'<span class="chip{"" if trajectory.ended in NORMAL_ENDINGS else " odd"}">{html.escape(ended)}</span>'
    )
    chips += [
        f'<span class="chip odd">{text}</span>'
        for limit, text in CUT_LABELS.items()
        if limit in {reached for _, reached in trajectory.cuts}
    ]
    chips.append(
        f'<span class="quiet">question {html.escape(trajectory.question.id)} · group {trajectory.group} · '
        f"request {trajectory.request}</span>"
    )
    gold = " <i>or</i> ".join(html.escape(answer) for answer in trajectory.question.answers) or "–"
    facts = [
        ("gold answer", f"<b>{gold}</b>"),
        ("answer", _text_or_none(trajectory.answer, f"<b class='{verdict}'>", "</b>")),
    ]
    if trajectory.evidence or trajectory.reader_answer:
        facts.append(("reader, from the evidence alone", _text_or_none(trajectory.reader_answer)))
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    question = html.escape(trajectory.question.text)
    return f"<h2>{question}</h2><p class='chips'>{' '.join(chips)}</p><dl class='facts'>{rows}</dl>"


def _text_or_none(text: str, before: str = "", after: str = "") -> str:
    return f"{before}{html.escape(text)}{after}" if text.strip() else '<span class="quiet">none</span>'


def _rewards(trajectory: Trajectory) -> str:
    if not trajectory.rewards:
        return ""
    parts = [(name, value) for name, value in trajectory.rewards.items() if name != "total"]
    if "total" in trajectory.rewards:
        parts.append(("total", trajectory.rewards["total"]))
    longest = max([abs(value) for _, value in parts] + [1e-9])
    rows = "".join(
        f'<tr class="{"total" if name == "total" else ""}"><th>{in_words(name)}</th><td class="number">{value:.2f}</td>'
        f'<td class="gauge"><i class="{"minus" if value < 0 else ""}" style="width:{100 * abs(value) / longest:.0f}%">'
        "</i></td></tr>"
        for name, value in parts
    )
    scores = " · ".join(f"{in_words(name)} {_number(value)}" for name, value in trajectory.metrics.items())
    return f'<section><h3>reward</h3><table>{rows}</table><p class="quiet">{scores}</p></section>'


def _searches(trajectory: Trajectory) -> str:
    if not trajectory.searches:
        return '<section class="wide"><h3>searches</h3><p class="quiet">no searches</p></section>'
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
        passages = f"<ol>{''.join(titles)}</ol>" if titles else '<span class="quiet">no passages</span>'
        if search.failed:
            passages = '<span class="chip wrong">retrieval failed</span>'
        rows.append(
            f'<tr><td class="number">{number}</td><th>{html.escape(search.query)}</th><td>{passages}</td></tr>'
        )
    missed = [title for title in trajectory.question.gold if title_key(title) not in seen]
    note = ""
    if gold:
        note = f"{len(gold & seen)} of {len(gold)} gold passages found"
        if missed:
            note += "; not found: " + ", ".join(html.escape(title) for title in missed)
    return f'<section class="wide"><h3>searches</h3><table>{"".join(rows)}</table><p class="quiet">{note}</p></section>'


def _tokens(trajectory: Trajectory, source: str) -> str:
    counts = {role: int((trajectory.roles == role).sum()) for role in (PROMPT, POLICY, ENVIRONMENT)}
    total = sum(counts.values())
    if not total:  # read from a file without token ids
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


def _segment(segment: Segment, trajectory: Trajectory, tags: Mapping[Tag, str]) -> str:
    origin = "sampled" if segment.role == POLICY else "given"
    label = f'<span class="label">{html.escape(segment.kind)}</span>' if segment.kind != "reasoning" else ""
    if segment.role != POLICY:
        text = _observation(segment.text, trajectory)
    elif segment.tokens:
        text = "".join(_token(text, logp) for text, logp in segment.tokens)
    elif segment.kind == "reasoning":
        text = _with_stray_tags(segment.text.strip(), tags)
    else:
        text = html.escape(segment.text.strip())
    return f'<div class="segment {segment.kind} {origin}">{label}<div class="words">{text}</div></div>'


def _token(text: str, logp: float) -> str:
    """Return a sampled token, underlined more strongly the less likely it was.

    There are only six strengths, which keeps pages small.
    """
    level = min(int(-logp * 2), 6)
    return f'<t class="p{level}" title="{logp:.2f}">{html.escape(text)}</t>' if level else html.escape(text)


def _observation(text: str, trajectory: Trajectory) -> str:
    """Return an observation with its titles in bold and gold titles marked. A title is found by the format "(Title: T) text"."""
    text = text.strip()
    titles = sorted(
        {title for search in trajectory.searches for title in search.titles}, key=len, reverse=True
    )
    if not titles:
        return html.escape(text)
    gold = _gold(trajectory)
    parts = re.split(rf"(\(Title: (?:{'|'.join(map(re.escape, titles))})\))", text)
    for index in range(1, len(parts), 2):
        title = parts[index][len("(Title: ") : -1]
        parts[index] = (
            f'<b class="{"gold" if title_key(title) in gold else "title"}">{html.escape(title)}</b>'
        )
    return "".join(part if index % 2 else html.escape(part) for index, part in enumerate(parts))


def _with_stray_tags(text: str, tags: Mapping[Tag, str]) -> str:
    out, end = [], 0
    for start, stop in stray_tags(text, tags):
        stray = f'<b class="stray" title="this tag is not part of a well-formed pair">{html.escape(text[start:stop])}</b>'
        out += [html.escape(text[end:start]), stray]
        end = stop
    return "".join([*out, html.escape(text[end:])])


def _gold(trajectory: Trajectory) -> set[str]:
    return {title_key(title) for title in trajectory.question.gold}


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.2f}"


def in_words(name: str) -> str:
    """Return a field's name with spaces instead of underscores, escaped for HTML."""
    return html.escape(name.replace("_", " "))
