"""Why the advice is what it is, in sentences made of its figures."""

from __future__ import annotations

import math

from eplb_opt.advice import Advice, Verdict
from eplb_opt.bootstrap import Estimate

__all__ = ["reasons"]

_GIB = 2**30


def reasons(advice: Advice) -> tuple[str, ...]:
    """Return sentences, the answer first.

    Parameters
    ----------
    advice
        All figures.
    """
    said = [_answer(advice), *_bounds(advice), _batches(advice), *_ladder(advice)]
    said += [*_others(advice), *_stages(advice), *_costs(advice), *_rules(advice)]
    return tuple(said)


def _percent(share: float) -> str:
    """Say a share in percent."""
    return f"{100 * share:.1f} %"


def _less(gain: Estimate) -> str:
    """Say a gain as less, and a loss as more."""
    if gain.value >= 0:
        return f"{gain} less"
    return f"{Estimate(-gain.value, -gain.high, -gain.low)} more"


def _answer(advice: Advice) -> str:
    time = "mean step time" if advice.target == "all" else f"mean {advice.target} time"
    least, best = _percent(advice.min_gain), advice.best
    measured = (
        f"{_less(advice.gain)} {time} on {advice.parts.target} steps that it was not chosen on"
    )
    if advice.verdict is Verdict.YES:
        return f"Yes: {best.label}. It takes {measured}."
    if advice.verdict is Verdict.NO:
        if advice.why.ceiling < advice.min_gain:
            most = _percent(max(advice.why.ceiling, 0.0))
            return (
                f"No: even perfect balance would lower the {time} by {most}, less than the {least} "
                f"that are asked for."
            )
        found = f"The best that was found, {best.label}, takes {measured}"
        return f"No: the gain is below {least}. {found}."
    more = advice.more_steps
    needed = (
        f"record about {more} steps more"
        if more is not None
        else "the gain is so near to what is asked for that recording more hardly helps"
    )
    recorded = advice.parts.warm_up + advice.parts.learned + advice.parts.chosen
    recorded += advice.parts.judged
    return (
        f"Too close to call with {recorded} steps: {best.label} takes {measured}, and {least} are "
        f"asked for; {needed}."
    )


def _bounds(advice: Advice) -> list[str]:
    why = advice.why
    shares = {name: share for name, share in why.shares.items() if share > 0}
    parts = ", ".join(f"{name} {_percent(share)}" for name, share in shares.items())
    said = [
        f"Without EPLB a step is {parts}; perfect balance would gain {_percent(why.ceiling)}.",
        f"Without EPLB the fullest GPU has {why.par_mean:.2f} times the mean of tokens (PAR, mean "
        f"over layers; {why.par_max:.2f} at most).",
    ]
    largest = max(shares, key=lambda name: shares[name])
    if why.ceiling < advice.min_gain and largest != "experts":
        bound = "communication-bound" if largest == "communication" else f"bound by the {largest}"
        said.append(f"The deployment is {bound}: experts are not what it waits for.")
    return said


def _batches(advice: Advice) -> str:
    why = advice.why
    has = f"An activated replica has {why.tokens_per_activated:.0f} tokens"
    if not math.isfinite(why.break_even):
        return f"{has}; the objective does not price tokens by themselves."
    if why.break_even <= 0:
        return f"{has}; the objective does not price activated replicas."
    if why.tokens_per_activated < why.break_even:
        return (
            f"{has}, below break-even ({why.break_even:.0f}): reading weights decides, so the "
            f"router should activate few replicas."
        )
    return (
        f"{has}, above break-even ({why.break_even:.0f}): arithmetic decides, so the router should "
        f"balance tokens."
    )


def _ladder(advice: Advice) -> list[str]:
    words = {
        "placement": "placing experts by load",
        "redundancy": "redundant slots under the equal split",
        "router": f"routing by {advice.best.router}",
        "updates": f"placing anew {advice.best.cycle}",
    }
    ladder = advice.why.ladder
    rungs = [f"{words[name]} {100 * gain:+.1f}" for name, gain in ladder.items()]
    said = [f"The gain in points: {', '.join(rungs)}."]
    reads = advice.why.tokens_per_activated < advice.why.break_even
    if reads and ladder.get("redundancy", 0.0) < 0:
        said.append(
            f"Redundant slots alone, as EPLB splits tokens over them, cost "
            f"{_percent(-ladder['redundancy'])}: every copy of a live expert is activated."
        )
    return said


def _others(advice: Advice) -> list[str]:
    """Say what others gain that people think of first, on the steps to choose by."""
    once = [c for c in advice.candidates if c.interval is None]
    anew = [c.gain for c in advice.candidates if c.interval is not None]
    # Slots that GPUs must fill are fewer than GPUs, and others come by the GPU.
    even = [c for c in once if c.redundant >= advice.num_gpus and c.router == "uniform"]
    said = []
    if even:
        eplb = max(even, key=lambda c: c.gain)
        gains = f"gains {_percent(eplb.gain)}" if eplb.gain > 0 else f"loses {_percent(-eplb.gain)}"
        said.append(
            f"Redundant slots under the equal split, which EPLB counts on: the best, {eplb.label}, "
            f"{gains}."
        )
    if once and anew:
        best = max(c.gain for c in once)
        said.append(f"Placing once gains {_percent(best)} at best, anew {_percent(max(anew))}.")
    return said


def _stages(advice: Advice) -> list[str]:
    """Say what the answer does not: other figures, and the SLO."""
    said = []
    for name, gain in advice.gains.items():
        stage, figure = name.split()
        if name != f"{advice.target} mean":
            said.append(f"Of {stage}, {figure}: {_less(gain)} time.")
        within = f"{stage} within SLO"
        if figure == "mean" and within in advice.before:
            now, then = advice.after[within], advice.before[within]
            said.append(
                f"Of {stage}, {_percent(now)} of the steps are within the SLO, {_percent(then)} "
                f"without EPLB."
            )
    return said


def _costs(advice: Advice) -> list[str]:
    costs, said = advice.costs, []
    if costs.memory is not None:
        said.append(f"It needs {costs.memory / _GIB:.2f} GiB more on each GPU.")
    if costs.migration:
        said.append(f"Moves take {_percent(costs.migration)} of the time ({advice.best.moves}).")
    if costs.first_move:
        repaid = f"repaid in {costs.repaid_in:.0f} steps"
        if costs.repaid_in is None or not math.isfinite(costs.repaid_in):
            repaid = "never repaid"
        said.append(
            f"To get there from experts in order takes {costs.first_move:.0f} ms, {repaid}; "
            f"nothing where the placement is loaded at the start."
        )
    return said


def _rules(advice: Advice) -> list[str]:
    said = []
    for rule in advice.rules:
        says = "does not pay" if rule.against else "may pay"
        agrees = {True: "the trace agrees", False: "the trace disagrees", None: "open here"}
        said.append(
            f"Rule of thumb, no EPLB with {rule.rule}: {rule.value:.0f} here, so it {says}; "
            f"{agrees[rule.agrees]}."
        )
    return said
