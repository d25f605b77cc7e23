"""How many drafted tokens the target accepts, on Spec-Bench questions, by category.

    python -m training.evaluate --draft DIR --questions spec_bench_question.jsonl --json out.json

The target answers every question (both turns where there are two); the draft is then asked for each token of the
answers, given all before it. Greedy acceptance is the share that it gets right; at a temperature, the expected share,
sum(min(p, q)), over texts sampled at it. `emitted` counts tokens per step of a fixed speculation length, the bonus
token included. Prompt lookup is measured on the same greedy answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from dsde.drafting.ngram import NgramDrafter
from dsde.models.embedded import ensure_embedded_target
from dsde.models.tokenizer import Tokenizer
from training.folder import read_draft
from training.llama import Llama, load_target, logits
from training.prompts import Prompt, encode
from training.sampling import Request, Sampler

CATEGORIES = ("chat", "translation", "summarization", "qa", "math_reasoning", "rag")
LENGTHS = (1, 2, 3, 4, 5, 6, 8)
SHOWN = (2, 4, 8)
Table = dict[str, dict[str, float]]


@dataclass(slots=True)
class Answer:
    """What the target said to one turn."""

    category: str
    prompt: list[int]
    tokens: list[int]


def read_questions(path: Path, limit: int | None) -> list[tuple[str, list[str]]]:
    """Category and turns; the eight categories of MT-Bench are one here. `limit`: so many of each category."""
    taken: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        category = row["category"] if row["category"] in CATEGORIES else "chat"
        taken[category].append((category, row["turns"]))
    return [question for questions in taken.values() for question in questions[:limit]]


def answer(
    sampler: Sampler, tokenizer: Tokenizer, questions: list[tuple[str, list[str]]], temperature: float
) -> list[Answer]:
    """All turns, the second after the target's own answer to the first."""
    chats: list[list[tuple[str, str]]] = [[] for _ in questions]
    answers = []
    for turn in range(max(len(turns) for _, turns in questions)):
        requests = []
        for index, (_, turns) in enumerate(questions):
            if turn < len(turns):
                chats[index].append(("user", turns[turn]))
                requests.append(Request(encode(tokenizer, Prompt("", tuple(chats[index]))), temperature, str(index)))
        corpus = sampler.run(requests, 16, lambda message: None)
        for tag, prompt, tokens in zip(corpus.tags, corpus.prompts, corpus.completions, strict=True):
            chats[int(tag)].append(("assistant", tokenizer.decode(tokens)))
            answers.append(Answer(questions[int(tag)][0], prompt, tokens))
    return answers


@torch.inference_mode()
def hidden_states(model: Llama, item: Answer) -> Tensor:
    """Of the tokens before each one that was written."""
    tokens = torch.tensor([item.prompt + item.tokens], device=model.embedding.device)
    return model(tokens)[0, len(item.prompt) - 1 : -1]


@torch.inference_mode()
def overlap(draft: Llama, target: Llama, rows: Tensor, vocab: Tensor, item: Answer, temperature: float) -> float:
    """Sum over the answer's tokens of the probability that a token drafted in their place is accepted."""
    p = (logits(hidden_states(target, item), target.embedding) / temperature).softmax(-1)
    q = (logits(hidden_states(draft, item), rows) / temperature).softmax(-1)
    return float(torch.minimum(p[:, vocab.to(rows.device)], q).sum())


def count_steps(num_tokens: int, accepted_at: Callable[[int], int]) -> int:
    """Steps that it takes to emit the tokens, where `accepted_at(i)` drafted tokens stand from token i on."""
    at = steps = 0
    while at < num_tokens:
        at += accepted_at(at) + 1
        steps += 1
    return steps


def run_length(matches: list[bool], start: int, longest: int) -> int:
    window = matches[start : start + longest]
    return window.index(False) if False in window else len(window)


def lookup_steps(item: Answer, length: int) -> tuple[int, int, int]:
    """Steps, drafted and accepted tokens of prompt lookup."""
    drafter, drafted, accepted = NgramDrafter(), 0, 0
    text = SimpleNamespace(tokens=[], draft_state=None)

    def accepted_at(i: int) -> int:
        nonlocal drafted, accepted
        text.tokens = item.prompt + item.tokens[:i]
        proposal = drafter.propose([text], np.array([length])).tokens[0].tolist()
        following = item.tokens[i : i + len(proposal)]
        right = [guess == token for guess, token in zip(proposal, following, strict=False)]
        stood = run_length(right, 0, length)
        drafted += len(proposal)
        accepted += stood
        return stood

    return count_steps(len(item.tokens), accepted_at), drafted, accepted


def by_category(answers: Iterable[Answer], measures: Iterable[dict[str, float]]) -> Table:
    """Sums of measures by category and over all."""
    table: dict[str, dict[str, float]] = {name: defaultdict(float) for name in (*CATEGORIES, "all")}
    for item, measure in zip(answers, measures, strict=True):
        for name in (item.category, "all"):
            table[name]["tokens"] += len(item.tokens)
            for key, value in measure.items():
                table[name][key] += value
    return {name: dict(row) for name, row in table.items() if row.get("tokens")}


@torch.inference_mode()
def measure_greedy(draft: Llama, target: Llama, vocab: Tensor, sizes: list[int], answers: list[Answer]) -> Table:
    """Greedy acceptance and emitted tokens per step at every size of the head: a smaller one has the first rows."""
    rows, measures = target.embedding[vocab.to(target.embedding.device)], []
    for item in answers:
        scores, measure = logits(hidden_states(draft, item), rows), {}
        for size in sizes:
            guesses = vocab[scores[:, :size].argmax(-1).cpu()]
            matches = (guesses == torch.tensor(item.tokens)).tolist()
            measure[f"acceptance@{size}"] = sum(matches)
            for length in LENGTHS:
                steps = count_steps(len(matches), lambda i, m=matches, k=length: run_length(m, i, k))
                measure[f"emitted@{size}/{length}"] = steps
        measures.append(measure)
    return _rates(by_category(answers, measures))


def measure_lookup(answers: list[Answer], length: int) -> Table:
    measures = []
    for item in answers:
        steps, drafted, accepted = lookup_steps(item, length)
        measures.append({"emitted": steps, "drafted": drafted, "accepted": accepted})
    table = _rates(by_category(answers, measures))
    for row in table.values():
        row["acceptance"] = row.pop("accepted") / row["drafted"] if row["drafted"] else 0.0
        row["drafted"] *= row["tokens"]
    return table


def some_of_each(answers: list[Answer], limit: int | None) -> list[Answer]:
    """Up to `limit` answers of every category, spread evenly: answers come in the order in which they ended."""
    taken: dict[str, list[Answer]] = defaultdict(list)
    for item in answers:
        taken[item.category].append(item)
    if limit is None:
        return answers
    return [
        items[i] for items in taken.values() for i in np.linspace(0, len(items) - 1, min(limit, len(items)), dtype=int)
    ]


def measure_overlap(draft: Llama, target: Llama, vocab: Tensor, answers: list[Answer], temperature: float) -> Table:
    rows = target.embedding[vocab.to(target.embedding.device)]
    sums = [overlap(draft, target, rows, vocab, item, temperature) for item in answers]
    table = _rates(by_category(answers, [{"acceptance": value} for value in sums]))
    for name, row in table.items():
        row["answers"] = sum(name in (item.category, "all") for item in answers)
    return table


def _rates(table: Table) -> Table:
    """Sums divided by tokens; steps turned into tokens per step."""
    for row in table.values():
        for key in row:
            if key.startswith("emitted"):
                row[key] = row["tokens"] / row[key]
            elif key != "tokens":
                row[key] /= row["tokens"]
    return table


def markdown(result: dict[str, Table], size: int) -> str:
    """The table of the model card, for one size of the head."""
    head = ["category", "greedy", *(f"SL {k}" for k in SHOWN), "T = 0.7", "T = 1", "prompt lookup", "SL 4"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, row in result["greedy"].items():
        lookup = result["lookup"][name]
        cells = [row[f"acceptance@{size}"], *(row[f"emitted@{size}/{k}"] for k in SHOWN)]
        cells += [result[heat].get(name, {}).get("acceptance", float("nan")) for heat in ("0.7", "1.0")]
        cells += [lookup["acceptance"], lookup["emitted"]]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


def read_answers(
    args: argparse.Namespace, target: Llama, tokenizer: Tokenizer, eos: list[int]
) -> dict[str, list[Answer]]:
    """The target's answers by temperature, from a file where there is one."""
    if args.answers and args.answers.exists():
        saved = json.loads(args.answers.read_text("utf-8"))
        answers = {heat: [Answer(**item) for item in items] for heat, items in saved.items()}
        for item in itertools.chain(*answers.values()):
            item.tokens = item.tokens[: args.max_new]
        return answers
    questions = read_questions(args.questions, args.limit)
    sampler = Sampler(target, args.slots, args.context, args.max_new, eos, seed=0, keep_hidden=False)
    answers = {heat: answer(sampler, tokenizer, questions, float(heat)) for heat in ("0.0", "0.7", "1.0")}
    if args.answers:
        text = json.dumps({heat: [asdict(item) for item in items] for heat, items in answers.items()})
        args.answers.write_text(text, "utf-8")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, nargs="+", help="folders of drafts")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's questions, JSON lines")
    parser.add_argument("--target", type=Path, help="GGUF file (default: the embedded target)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="questions per category (default: all)")
    parser.add_argument("--limit-sampled", type=int, help="answers per category at the temperatures (default: all)")
    parser.add_argument("--max-new", type=int, default=256)
    parser.add_argument("--context", type=int, default=2304)
    parser.add_argument("--slots", type=int, default=480)
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[2048, 4096, 8192, 12288, 16384], help="sizes of the head"
    )
    parser.add_argument("--answers", type=Path, help="file to keep the target's answers in; read where it exists")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    args = parser.parse_args()
    device = torch.device(args.device)
    target, tokenizer, config = load_target(args.target or ensure_embedded_target(), torch.float32, device)
    answers = read_answers(args, target, tokenizer, [config["eos_token_id"]])
    results: dict[str, dict[str, Table]] = {}
    for folder in args.draft:
        draft, vocab = read_draft(folder, target.embedding)
        sizes = sorted({*(size for size in args.sizes if size < len(vocab)), len(vocab)})
        result = {"greedy": measure_greedy(draft, target, vocab, sizes, answers["0.0"])}
        rates = {size: round(result["greedy"]["all"][f"acceptance@{size}"], 4) for size in sizes}
        print(f"{folder}: greedy acceptance by size of the head: {rates}", flush=True)
        for heat in ("0.7", "1.0"):
            result[heat] = measure_overlap(
                draft, target, vocab, some_of_each(answers[heat], args.limit_sampled), float(heat)
            )
        results[str(folder)] = result
    lookup = measure_lookup(answers["0.0"], 4)
    for folder, result in results.items():
        result["lookup"] = lookup
        size = max(int(key.partition("@")[2]) for key in result["greedy"]["all"] if key.startswith("acceptance"))
        print(f"\n{folder}, head of {size}\n{markdown(result, size)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
