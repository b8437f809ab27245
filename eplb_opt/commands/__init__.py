"""The commands of ``eplb-opt`` that replay deployments, and what all commands have in common."""
