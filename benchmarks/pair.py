"""A real pair on a GPU: real models answer real questions, by category, under every policy.

    python benchmarks/pair.py TARGET DRAFT --prompts spec_bench_question.jsonl HumanEval.jsonl.gz --out pair.json

Policies that choose lengths rehearse, as a server does before its first request. Then every group of prompts runs until
an engine meets no new shapes of passes any more, six times at most: graphs are captured and prompts cached by then, so
that what is measured is decoding. As many requests run at a time as the batch has places, and whoever ends is followed
by the next, as by a server that is never idle. Then policies take turns, back and forth, and the fastest of `--rounds`
turns counts. A turn that met a new shape all the same, which takes tens of milliseconds once in an engine's life, is
taken again, and so is one that began or ended in a slow time of the host (`host_pace.py`), up to `--tries` times in
all. `cold` counts the steps of a turn that were still so, `slow` says whether the host was. Under each table `auto` is
compared with the best static length of every category and with the best for all of them, and with `off`, within each
round; printed are means over rounds with their 95 % interval. Everything measured so far is in `--out` after every
category.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dsde import LLM, SamplingParams  # isort: skip  (before torch, as in cpu.py)
import numpy as np
import torch

from cores import keep_to_cores
from host_pace import Watch
from intervals import half_width
from report import MAX_NUM_BATCHED_TOKENS, Report, Row, make_parser, parse, policy_names, speed_ratio, whole

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
COUNTS = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
MOST_WARM_UPS = 6
NUM_WAVES = 3
"""requests for every place of a batch: few of a turn's steps are those of its end, in which places are empty"""
Turn = tuple[float, list[list[int]], Row]
"""seconds, answers, and what was counted"""


def read_questions(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Prompts by category, from JSON lines, gzipped or not. MT-Bench's eight subjects are one category."""
    questions: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in content.decode().splitlines():
            row = json.loads(line)
            category = str(row.get("category", path.name.partition(".")[0]))
            prompt = row["turns"][0] if "turns" in row else row["prompt"]
            questions["mt_bench" if category in MT_BENCH else category].append(prompt)
    return questions


def take(prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` prompts, from the beginning again where there are too few."""
    return [prompts[i % len(prompts)] for i in range(count)]


def answer(llm: LLM, prompts: list[list[int]], batch: int, params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Seconds and answers, `batch` prompts at a time."""
    llm.engine.scheduler.max_num_seqs = batch
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]


def timed(llm: LLM, prompts: list[list[int]], batch: int, params: SamplingParams) -> Turn:
    """Seconds, answers, and what was counted."""
    before = counts(llm)
    seconds, answers = answer(llm, prompts, batch, params)
    return seconds, answers, {name: value - before[name] for name, value in counts(llm).items()}


def settled(
    llm: LLM, prompts: list[list[int]], batch: int, params: SamplingParams, watch: Watch, most_tries: int
) -> Turn:
    """A turn that met no new shapes, and no slow time, if it can be had."""
    if torch.cuda.is_available():
        keep_to_cores()
    for _ in range(most_tries):
        is_slow = watch.is_slow()
        turn = timed(llm, prompts, batch, params)
        turn[2]["slow"] = is_slow or watch.is_slow()
        if not turn[2]["num_cold_steps"] and not turn[2]["slow"]:
            break
    return turn


def warm_up(llm: LLM, prompts: list[list[int]], batch: int, params: SamplingParams) -> None:
    for _ in range(MOST_WARM_UPS):
        num_cold = llm.metrics.num_cold_steps
        answer(llm, prompts, batch, params)
        if llm.metrics.num_cold_steps == num_cold:
            return


def counts(llm: LLM) -> Row:
    return {name: getattr(llm.metrics, name) for name in (*COUNTS, "num_cold_steps")}


def measure(options: argparse.Namespace, report: Report) -> None:
    began, watch = time.perf_counter(), Watch()
    base = LLM(
        options.target,
        options.draft,
        "off",
        dtype=str(options.dtype).removeprefix("torch."),
        device=options.device,
        max_num_seqs=max(options.batches),
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=options.max_model_len,
        kv_cache_bytes=options.kv_gib << 30,
    )
    engines = {policy: base if policy == "off" else base.with_policy(policy) for policy in options.policies}
    for policy, llm in engines.items():
        if not policy.startswith(("off", "static")):  # these meet in a round all that they ever will
            llm.warm_up()
    report["models_s"] = time.perf_counter() - began
    print(f"models ready in {report['models_s']:.1f} s", flush=True)
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    most = max(options.per_category, NUM_WAVES * max(options.batches))
    encoded = {
        category: [base.chat_prompt([{"role": "user", "content": text}]) for text in texts[:most]]
        for category, texts in read_questions(options.prompts).items()
    }
    for batch in options.batches:
        for category, questions in encoded.items():
            prompts = take(questions, max(NUM_WAVES * batch, options.per_category))
            for llm in engines.values():
                if time.perf_counter() - began > options.time_limit:
                    print(f"past {options.time_limit:.0f} s: the rest is left out", flush=True)
                    return
                warm_up(llm, prompts, batch, params)
            rounds: dict[str, list[Turn]] = {policy: [] for policy in engines}
            for number in range(options.rounds):
                for policy in list(engines)[:: -1 if number % 2 else 1]:
                    rounds[policy].append(settled(engines[policy], prompts, batch, params, watch, options.tries))
            baseline: list[list[int]] = []
            for policy, turns in rounds.items():
                seconds, answers, added = min(turns, key=lambda turn: turn[0])
                baseline = baseline or answers
                row = {"batch": batch, "category": category, "policy": policy, "prompts": len(answers)}
                row |= speeds({"tokens": sum(map(len, answers)), "seconds": seconds, **added})
                row["step_ms"] = 1000 * seconds / max(added["num_steps"], 1)
                row["rounds"] = [sum(map(len, mine)) / taken for taken, mine, _ in turns]
                # In bfloat16 a batch of another shape may round another way: near ties fall differently.
                same = [mine == first for mine, first in zip(answers, baseline, strict=True)]
                row["answers_as_first_policy"] = sum(same) / len(same)
                report["cells"].append(row)
                print(line_of(row), flush=True)
            report.save()
    report["ours_s"] = time.perf_counter() - began


def speeds(totals: Row) -> Row:
    """The totals of one or several runs of one policy, and what follows from them."""
    drafts, drafted, accepted = (totals[name] for name in COUNTS[1:])
    return {
        **totals,
        "tokens_per_s": totals["tokens"] / totals["seconds"],
        "acceptance_rate": accepted / drafted if drafted else None,
        "emitted_per_step": 1 + accepted / drafts if drafts else 1.0,
    }


def merged(rows: Sequence[Row]) -> Row:
    """Several cells of one policy as one."""
    return speeds({name: sum(row[name] for row in rows) for name in ("tokens", "seconds", *COUNTS)})


def line_of(row: Row) -> str:
    rate = "-" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.3f}"
    return (
        f"batch {row['batch']:3} {row['category']:16}{row['policy']:12}{row['tokens_per_s']:9.1f} tokens/s  accepted "
        f"{rate:>5}  emitted {row['emitted_per_step']:.2f}  equal answers {row['answers_as_first_policy']:.2f}  "
        f"cold {row['num_cold_steps']}{' slow' * row['slow']}"
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table for every batch: categories down, policies across."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    lines = ["Each entry: tokens/s (against off), acceptance, tokens emitted per step."]
    for batch in dict.fromkeys(row["batch"] for row in rows):
        groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if row["batch"] == batch:
                groups[row["category"]][row["policy"]].append(row)
        complete = [group for group in groups.values() if len(group) == len(policies)]
        if len(complete) > 1:
            groups["all"] = {name: [row for group in complete for row in group[name]] for name in policies}
        lines += ["", f"| batch {batch} | {' | '.join(policies)} |", "| --- |" + " --- |" * len(policies)]
        for category, group in groups.items():
            cells = {name: merged(group[name]) for name in policies if name in group}
            entries = [markdown_entry(cells.get(name), cells.get("off")) for name in policies]
            lines.append(f"| {category} | {' | '.join(entries)} |")
        if len(complete) == len(groups) - 1:
            lines += ["", *comparisons({name: [group[name][0]["rounds"] for group in complete] for name in policies})]
    return "\n".join(lines)


def comparisons(speeds: dict[str, list[list[float]]]) -> list[str]:
    """`auto` against the best static lengths and `off`, of tokens/s by policy: [categories][rounds]. Which static
    length is the best is decided after all rounds."""
    if "auto" not in speeds:
        return []
    table = {name: np.array(rows) for name, rows in speeds.items()}
    static = np.array([rows for name, rows in table.items() if name.startswith("static")])
    lines = []
    if len(static):
        each = np.take_along_axis(static, static.mean(axis=2).argmax(axis=0)[None, :, None], axis=0)[0]
        single = static[np.argmin((table["auto"] / static).mean(axis=(1, 2)))]
        lines += [f"auto / best static length of each category: {with_interval(table['auto'] / each)}"]
        lines += [f"auto / best single static length: {with_interval(table['auto'] / single)}"]
    if "off" in table:
        lines += [f"auto / off: {with_interval(table['auto'] / table['off'])}"]
    return lines


def with_interval(ratios: np.ndarray) -> str:
    """Of [categories, rounds]: the mean over categories, with its interval over rounds, and the least category's."""
    means = ratios.mean(axis=0)
    return f"{means.mean():.3f} ± {half_width(means):.3f} (least {ratios.mean(axis=1).min():.3f})"


def markdown_entry(cell: Row | None, off: Row | None) -> str:
    if cell is None:
        return "-"
    text = f"{cell['tokens_per_s']:.0f}"
    if cell["acceptance_rate"] is None:
        return text
    ratio = speed_ratio(cell, off)
    text += "" if ratio is None else f" ({ratio:.2f}x)"
    return f"{text}, {cell['acceptance_rate']:.2f}, {cell['emitted_per_step']:.2f}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help="JSON lines with `turns` or `prompt`, and a `category`"
    )
    parser.add_argument("--batches", type=whole, default="1,8,32,64")
    parser.add_argument("--policies", type=policy_names, default="off,static:2,static:4,static:8,dsde,auto")
    parser.add_argument("--per-category", type=int, default=4, help="at least so many questions, whatever the batch")
    parser.add_argument("--tokens", type=int, default=128, help="at most, an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="of a turn, at most")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-gib", type=int, default=8, help="KV memory of every policy")
    options = parse(parser)
    report = Report(options, cells=[])
    try:
        measure(options, report)
    finally:
        report["markdown"] = markdown(report["cells"])
        report.save()
        print("\n" + report["markdown"], flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
