"""Settings of candidates, each made once, on all kinds of nodes that its stages are on."""

from __future__ import annotations

from autopar.solver.candidates import Candidate, SettingKey
from autopar.solver.hardware import Cluster
from autopar.solver.layout.model_facts import ModelFacts
from autopar.solver.mixed import AnySetting, MixedSetting
from autopar.solver.settings import Setting, make_setting
from autopar.solver.typed_axes import TypedAxes


class SettingStore:
    """Settings on a cluster; ``alone`` has those on nodes of one kind.

    Args:
        facts: The model.
        cluster: All nodes.
        reduce_itemsize: Bytes of an element of gradients that are reduced.
    """

    def __init__(self, facts: ModelFacts, cluster: Cluster, reduce_itemsize: int) -> None:
        self.facts, self.cluster, self.reduce_itemsize = facts, cluster, reduce_itemsize
        self.axes = TypedAxes(facts=facts, cluster=cluster.groups[0])
        self.alone: dict[SettingKey, Setting] = {}
        self._on: dict[tuple[Cluster, SettingKey], Setting] = {}  # of several groups of nodes
        self._mixed: dict[tuple[object, ...], MixedSetting] = {}

    def of(self, candidate: Candidate) -> AnySetting:
        """The setting of a candidate."""
        if self.cluster.is_mixed:
            return self._of_groups(candidate)
        key = candidate.setting_key
        if key not in self.alone:
            self.alone[key] = self._make(self.cluster, self.axes, candidate)
        return self.alone[key]

    def use(self, candidate: Candidate, setting: Setting) -> None:
        """Take the setting of a candidate from elsewhere, on nodes of one kind."""
        self.alone[candidate.setting_key] = setting

    def _of_groups(self, candidate: Candidate) -> MixedSetting:
        """Of all kinds of nodes that the candidate's stages are on."""
        degrees = candidate.setting_key
        key = (*degrees, candidate.pp, candidate.ranks_per_stage, candidate.group_order)
        if key not in self._mixed:
            sites, settings = candidate.sites(self.cluster), {}
            for cluster in sites.clusters:
                priced = cluster  # where layout axes stay inside a node it has no other links
                if candidate.cp * candidate.ep == 1 and candidate.tp <= cluster.gpus_per_node:
                    priced = sites.own[cluster]
                if (priced, degrees) not in self._on:
                    axes = self.axes.on(priced)
                    self._on[priced, degrees] = self._make(priced, axes, candidate)
                settings[cluster] = self._on[priced, degrees]
            self._mixed[key] = MixedSetting(sites=sites, settings=settings)
        return self._mixed[key]

    def _make(self, cluster: Cluster, axes: TypedAxes, candidate: Candidate) -> Setting:
        return make_setting(
            self.facts,
            cluster,
            axes,
            cp=candidate.cp,
            ep=candidate.ep,
            tp=candidate.tp,
            micro_batch_size=candidate.micro_batch_size,
            reduce_itemsize=self.reduce_itemsize,
            way=candidate.way,
            strides=candidate.layout_strides,
        )
