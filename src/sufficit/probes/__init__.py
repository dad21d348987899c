"""Probes: each is one measurement of a run. A new trust check is a file here and a line in
`sufficit.runs.probes_of`.
"""

from sufficit.probes.probe import Condition, Probe, ProbeBase, SourceRows

__all__ = ["Condition", "Probe", "ProbeBase", "SourceRows"]
