"""Route one batch, and see the proof that no routing does better.

Four GPUs hold four experts, twice each. Sharing every expert's tokens equally makes each GPU read
the weights of both its experts; routed to the optimum, each GPU reads one, with as many tokens as
before. The certificate is a set of GPUs: counting the live experts that only they hold proves it.
"""

from __future__ import annotations

import eplb_opt as eo

A, B, C, D = range(4)


def main() -> None:
    """Compare the equal split with the optimum."""
    placement = eo.Placement([[A, B], [A, C], [B, D], [C, D]])
    tokens = [4, 4, 4, 4]
    for method in ("uniform", "optimal"):
        routing = eo.solve_routing(placement, tokens, method=method)
        print(f"{method}: activated {routing.activated}, tokens {routing.gpu_tokens()}")

    proven = eo.certified_bound(placement, tokens, routing.certificate)
    print(f"GPUs in the certificate: {routing.certificate.nonzero()[0]}")
    print(f"they prove: at least {proven:g} activated on some GPU; reached: {routing.makespan:g}")

    # Four tokens choose their experts; each goes to the GPU that the routing chose.
    topk_ids = [[A, B], [A, B], [A, C], [A, C], [B, D], [B, D], [C, D], [C, D]]
    gpus = routing.assign(topk_ids) // placement.slots_per_gpu
    print(f"the first token's experts A and B are served by the GPUs {gpus[0]}")


if __name__ == "__main__":
    main()
