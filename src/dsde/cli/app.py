"""The commands and their options. What they do is in the files beside this one; only those import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsde import __version__
from dsde.core.errors import DsdeError
from dsde.core.params import DEFAULT_POLICY, SamplingParams
from dsde.server.settings import ServerSettings

app = typer.Typer(
    name="dsde",
    help="Speculative decoding that tunes itself.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_DEFAULTS = SamplingParams()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsde {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding that tunes itself: every request drafts as many tokens as pay off, at every step.

    The output is exactly what the target model alone would give.
    """


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, max=8, help="How many of the eight prompts to use.")] = 8,
    batch_size: Annotated[
        int, typer.Option(min=1, max=8, help="Prompts at a time; on a CPU speculation pays only for few.")
    ] = 1,
) -> None:
    """Generate the same text without speculation, with a fixed length and with DSDE, and compare.

    Uses the embedded models; fetches them on first use.
    """
    from dsde.cli.demo import run_demo

    run_demo(max_tokens, num_prompts, batch_size)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" to read it from standard input.')],
    target: Annotated[
        str | None, typer.Option(help="Hub id, folder or GGUF file. Default: the embedded model.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help='As target; or "embedded", "ngram", "none", "skip:12-15", "noise:0.1", "round:4".'),
    ] = None,
    policy: Annotated[str, typer.Option(help="Who chooses the length; see `dsde policies`.")] = DEFAULT_POLICY,
    speculative_config: Annotated[
        str | None, typer.Option(help='vLLM\'s JSON form, e.g. \'{"model": "ngram", "num_speculative_tokens": 4}\'.')
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = _DEFAULTS.top_p,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0: all.")] = _DEFAULTS.top_k,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this share of the best.")
    ] = _DEFAULTS.min_p,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: discourage tokens already seen.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text depend on this number alone.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write what every step did, one JSON object a line.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cost_model: Annotated[
        Path | None, typer.Option(help="File to keep what was learnt of seconds in, for policies that look at them.")
    ] = None,
) -> None:
    """Generate text from a prompt and stream it to the terminal."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or [],
    )
    from dsde.cli.generate import ModelChoice, run_generate

    choice = ModelChoice(target, draft, policy, speculative_config, dtype, device, cost_model)
    run_generate(prompt, choice, params, raw=raw, trace=trace, as_json=as_json)


@app.command()
def serve(
    target: Annotated[
        str | None, typer.Option(help="Hub id, folder or GGUF file. Default: the embedded model.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help='As target; or "embedded", "ngram", "none", "skip:12-15", "noise:0.1", "round:4".'),
    ] = None,
    policy: Annotated[str, typer.Option(help="Who chooses the length; see `dsde policies`.")] = DEFAULT_POLICY,
    speculative_config: Annotated[
        str | None, typer.Option(help='vLLM\'s JSON form, e.g. \'{"model": "ngram", "num_speculative_tokens": 4}\'.')
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: reachable from other machines.")
    ] = ServerSettings.host,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = ServerSettings.port,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="DSDE_API_KEY", help="Key that requests must bring; may be repeated."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web page that may call from a browser; may be repeated.")
    ] = None,
    served_model_name: Annotated[
        str, typer.Option(help="What requests call the model.", show_default="the target's name")
    ] = ServerSettings.model_name,
    dashboard: Annotated[bool, typer.Option(help="Serve /dashboard.")] = ServerSettings.dashboard,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences that run at once.", show_default="256")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of prompts read in one step.", show_default="512; 2048 on a GPU")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and output together.", show_default="what fits")
    ] = None,
    kv_cache_bytes: Annotated[
        int | None, typer.Option(help="Memory for keys and values.", show_default="2 GiB; what is free on a GPU")
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Sequences that may wait beside them; whoever comes then gets 429.")
    ] = ServerSettings.max_queue,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Most tokens a request may ask for.", show_default="what the context leaves")
    ] = ServerSettings.max_output_tokens,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = ServerSettings.max_body_bytes,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds for a request to arrive.")
    ] = ServerSettings.body_timeout_s,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds until an answer must have ended.")
    ] = ServerSettings.request_timeout_s,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that those under way have to finish after SIGTERM.")
    ] = ServerSettings.drain_timeout_s,
    per_request_spec_decode_metrics: Annotated[
        str, typer.Option(help="What answers tell of speculation: none, summary or detailed.")
    ] = ServerSettings.spec_decode_metrics,
    log_format: Annotated[str, typer.Option(help="text or json.")] = ServerSettings.log_format,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")
    ] = ServerSettings.log_prompts,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Where OpenTelemetry traces go, e.g. http://localhost:4318/v1/traces.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    cost_model: Annotated[
        Path | None, typer.Option(help="File to keep what was learnt of seconds in, for policies that look at them.")
    ] = None,
    warm_up: Annotated[
        bool, typer.Option(help="On a GPU, compile and capture what requests will need before the first one comes.")
    ] = True,
) -> None:
    """Serve models over the OpenAI API, with metrics and a dashboard."""
    settings = ServerSettings(
        model_name=served_model_name,
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        dashboard=dashboard,
        max_queue=max_queue,
        max_output_tokens=max_output_tokens,
        max_body_bytes=max_body_bytes,
        body_timeout_s=body_timeout,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        spec_decode_metrics=per_request_spec_decode_metrics,  # type: ignore[arg-type]
        log_format=log_format,  # type: ignore[arg-type]
        log_prompts=log_prompts,
        otlp_endpoint=otlp_endpoint,
    )
    from dsde.cli.generate import ModelChoice

    try:
        from dsde.cli.serve import run_serve
    except ModuleNotFoundError as error:
        raise DsdeError(f'`dsde serve` needs {error.name}: pip install "dsde[server]"') from None
    choice = ModelChoice(target, draft, policy, speculative_config, dtype, device, cost_model)
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "kv_cache_bytes": kv_cache_bytes,
    }
    run_serve(choice, settings, limits, warm_up)


@app.command()
def bench(
    policies: Annotated[
        str | None,
        typer.Option(help="Policies to compare, between commas; see `dsde policies`.", show_default="a selection"),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="mixed, code, chat, math, summarise, translate, extract, transition or a FILE (Spec-Bench, HumanEval, "
            "GSM8K, ShareGPT), several between commas.",
            show_default="mixed",
        ),
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Between commas.", show_default="1")] = None,
    temperature: Annotated[str | None, typer.Option(help="Between commas; 0 is greedy.", show_default="0")] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Of every workload; a batch takes at least as many as it has places.", show_default="12"),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.", show_default="96")] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of every contender.", show_default="3")] = None,
    arrival: Annotated[
        str | None, typer.Option(help="closed or poisson:RATE, requests a second.", show_default="closed")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="An experiment of the paper: latency, low-acceptance, scaling, sensitivity or signals."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first impression, in minutes.")] = False,
    peers: Annotated[
        str, typer.Option(help="Other programs in the same run: auto, none, or of transformers and vllm.")
    ] = "auto",
    target: Annotated[
        str | None, typer.Option(help="Hub id, folder or GGUF file. Default: the embedded model.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help='As target; or "embedded", "ngram", "none", "skip:12-15", "noise:0.1", "round:4".'),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Of the order of prompts and of sampled texts.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results and reports; what it holds is not measured again.")
    ] = Path("dsde-bench"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what the folder holds already.")] = False,
) -> None:
    """Compare policies on real models: speed with intervals, latency, acceptance, waste; and write a report."""
    from dsde.cli.bench import Options, run_bench

    options = Options(
        policies=policies,
        workload=workload,
        batch_sizes=batch_sizes,
        temperature=temperature,
        requests=requests,
        max_tokens=max_tokens,
        rounds=rounds,
        arrival=arrival,
        preset=preset,
        quick=quick,
        peers=peers,
        target=target,
        draft=draft,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    run_bench(options, out, fresh, sys.argv[1:])


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="results.json of a run of `dsde bench`.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="the one that the results are in")
    ] = None,
    picture_format: Annotated[str, typer.Option("--format", help="svg or png.")] = "svg",
) -> None:
    """Make the reports and pictures of a run again, from its results."""
    from dsde.cli.plot import run_plot

    run_plot(results, out, picture_format)


@app.command()
def trace(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    policy: Annotated[str, typer.Option(help="Who chooses the length; see `dsde policies`.")] = DEFAULT_POLICY,
    target: Annotated[
        str | None, typer.Option(help="Hub id, folder or GGUF file. Default: the embedded model.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help='As target; or "embedded", "ngram", "none", "skip:12-15", "noise:0.1", "round:4".'),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text depend on this number alone.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Also print a line for every step.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also draw it: a file that ends in .svg or .png.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Show where every token of an answer came from: drafted and accepted, rejected, or the target's own."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    from dsde.cli.generate import ModelChoice
    from dsde.cli.trace import run_trace

    choice = ModelChoice(target, draft, policy, None, dtype, device)
    run_trace(prompt, choice, params, raw=raw, steps=steps, out=out)


@app.command()
def simulate(
    policies: Annotated[
        str, typer.Option(help="Policies to compare, between commas; see `dsde policies`.")
    ] = "off,static:4,dsde",
    batch_size: Annotated[str, typer.Option(help='Batch sizes between commas; "all": all requests at once.')] = "1,16",
    stream: Annotated[
        str, typer.Option(help="iid:RATE, phases, mixed:RATE,RATE, or a FILE of recorded requests.")
    ] = "phases",
    cost: Annotated[str, typer.Option(help="memory-bound, compute-bound, or JSON.")] = "memory-bound",
    requests: Annotated[int, typer.Option(help="Requests to finish.")] = 64,
    tokens: Annotated[int, typer.Option(help="Most tokens of a request.")] = 256,
    seed: Annotated[int, typer.Option(help="Requests depend on this number alone.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")] = None,
) -> None:
    """Compare policies without models: drawn or recorded requests, in virtual time."""
    from dsde.cli.simulate import Setting, run_simulate

    run_simulate(Setting(policies, batch_size, stream, cost, requests, tokens, seed), out)


@app.command()
def policies() -> None:
    """List who can choose the speculation length, and whether the output stays exactly the target's."""
    from dsde.cli.lists import show_policies

    show_policies()


@app.command()
def models(
    export: Annotated[
        Path | None, typer.Option(help="Write target and draft as Hugging Face folders below this one.")
    ] = None,
) -> None:
    """Show the embedded models and where they lie, or write them out for other programs."""
    from dsde.cli.lists import export_models, show_models

    if export is None:
        show_models()
    else:
        export_models(export)
