// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/engine/group/access.h>
#include <weft/engine/shard/model_ranks.h>

namespace weft::shard {

ModelRanks::ModelRanks(const std::variant<ProcessGroup, Mesh>& over, const char* user) {
  if (const auto* const group = std::get_if<ProcessGroup>(&over)) {
    if (!*group) throw Error(Blame::Caller, std::string(user) + ": the group is empty");
    all = shards = *group;
    return;
  }
  const Mesh& mesh = std::get<Mesh>(over);
  const std::vector<MeshAxis> axes = mesh.axes();
  if (axes.size() > 2) {
    std::string names;
    for (const MeshAxis& axis : axes) names += (names.empty() ? "" : ", ") + axis.name;
    throw Error(Blame::Caller,
                std::string(user) + ": the mesh has " + std::to_string(axes.size()) + " axes (" +
                    names +
                    "), and a model is sharded along one axis and averaged along another; pass "
                    "the part of the mesh that trains the model, mesh.slice({\"" +
                    axes[axes.size() - 2].name + "\", \"" + axes.back().name + "\"})");
  }
  all = mesh.group();
  shards = mesh[axes.back().name];
  if (axes.size() == 2 && axes.front().ranks > 1) replicas = mesh[axes.front().name];
}

bool ModelRanks::are_same(const ModelRanks& other) const {
  const bool same_replicas = replicas && other.replicas ? group::are_same(replicas, other.replicas)
                                                        : !replicas && !other.replicas;
  return same_replicas && group::are_same(shards, other.shards);
}

}  // namespace weft::shard
