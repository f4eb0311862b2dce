"""Benchmark a served model: plan the traffic, send it, report the figures.

traffic (what is sent, when) × transport (how) × processes (who sends) → records → statistics → reports.
"""
