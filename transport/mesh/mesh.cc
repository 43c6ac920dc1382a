// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <optional>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/meeting.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/mesh/mesh_communicator.h>

namespace weft::transport::mesh {

namespace {

// An operation that reaches its deadline tells more than the end of joining, which is as late.
constexpr auto kReason = std::chrono::milliseconds(200);

// Throws Unsupported if this rank cannot reach another one.
void require_reach(const Connector& connector, const Table& table, int rank,
                   const std::string& place) {
  for (int peer = 0; peer < static_cast<int>(table.addresses.size()); ++peer) {
    if (peer == rank) continue;
    if (const auto why =
            connector.why_unreachable(table.addresses[static_cast<std::size_t>(peer)])) {
      throw Error(Blame::Unsupported,
                  place + ": this rank cannot reach rank " + std::to_string(peer) + ": " + *why)
          .with_ranks({peer});
    }
  }
}

std::string name_of(const Connector& connector, const std::string& backend, const Table& table,
                    int rank) {
  std::optional<std::string> name;
  for (int peer = 0; peer < static_cast<int>(table.addresses.size()); ++peer) {
    if (peer == rank) continue;
    const auto one = connector.transport_to(table.addresses[static_cast<std::size_t>(peer)]);
    if (one.empty() || (name && *name != one)) return backend;
    name = one;
  }
  return name.value_or(backend);
}

// How the ranks of a group reach each other.
struct Met {
  std::shared_ptr<Door> door;
  Token group{};             // the name of the group at that door
  std::vector<int> members;  // its ranks at that door
  Table table;
};

// For ranks of a mesh that already have its addresses; nothing if they have none that this backend
// uses.
std::optional<Met> meet_as_part(const std::string& backend, const JoinOptions& options) {
  if (options.parent_ranks.empty()) return std::nullopt;
  const auto parent = options.parent.lock();
  const auto* const mesh = dynamic_cast<const MeshCommunicator*>(parent.get());
  const auto openings = mesh != nullptr ? mesh->openings() : nullptr;
  const auto door = openings ? openings->door() : nullptr;
  // A rank that met the others in the store would wait for them in vain.
  if (!parent || (openings && !door))
    throw Error(Blame::Cancelled, "the group whose ranks make it has ended on this rank");
  if (!door || !door->serves(backend, options)) return std::nullopt;
  Met met;
  met.door = door;
  for (const int rank : options.parent_ranks)
    met.members.push_back(openings->members().at(static_cast<std::size_t>(rank)));
  met.table =
      part_of(openings->table(), options.parent_ranks, door->connector()->transport_of_host());
  met.group = group_of(met.table.token, options.group_name);
  return met;
}

Met meet_in_store(const std::shared_ptr<Connector>& connector, const std::string& backend,
                  const JoinOptions& options, const std::string& place, const Reroute& reroute,
                  Deadline deadline) {
  Met met;
  try {
    met.door = Door::make(connector, backend, options, place, reroute);
  } catch (const Error& error) {
    throw error.within(place);
  }
  const Meeting meeting(options, place);
  met.table = meeting.hold(met.door->address(), *connector, deadline);
  require_reach(*connector, met.table, options.rank, place);
  met.door->open(met.table.token);
  met.members.resize(met.table.addresses.size());
  std::iota(met.members.begin(), met.members.end(), 0);
  return met;
}

// Waits until all ranks have joined, so that none of them needs the store any more.
void meet(Communicator& communicator, const Openings& openings, const std::string& place,
          const JoinOptions& options, Deadline deadline) {
  const Op met = communicator.barrier(Fence());
  if (!met.done().synchronize(deadline) && !met.done().synchronize(Deadline::in(kReason))) {
    const std::vector<int> pending = openings.pending();
    throw Error(Blame::Timeout,
                place + ": not all ranks joined within " + weft::describe(options.timeout) +
                    (pending.empty() ? "" : "; no connection with " + ranks_text(pending)))
        .with_ranks(pending);
  }
  if (const auto error = met.error()) throw error->within(place);
}

}  // namespace

std::shared_ptr<Communicator> join(const std::shared_ptr<Connector>& connector,
                                   const std::string& backend, const JoinOptions& options,
                                   const ChooserOf& chooser_of, const Reroute& reroute) {
  if (options.size == 1) {
    return std::make_shared<MeshCommunicator>(
        std::make_shared<Core>(options, backend, chooser_of("")));
  }
  const Deadline deadline = Deadline::in(options.timeout);
  const std::string place = "joining " + place_of(options, backend);
  std::optional<Met> met;
  try {
    met = meet_as_part(backend, options);
  } catch (const Error& error) {
    throw error.within(place);
  }
  const bool is_part = met.has_value();
  if (!is_part) met = meet_in_store(connector, backend, options, place, reroute, deadline);
  const auto openings =
      std::make_shared<Openings>(met->door, met->group, met->members, options, place);
  const auto core = std::make_shared<Core>(
      options, name_of(*met->door->connector(), backend, met->table, options.rank),
      chooser_of(met->table.transport), openings, Layout(met->table.hosts));
  if (options.rank == 0 && core->layout.has_levels()) {
    log::debug(place + ": collectives are done in two levels, within and between " +
               std::to_string(core->layout.hosts()) + " hosts");
  }
  const auto communicator = std::make_shared<MeshCommunicator>(core);
  openings->begin(std::move(met->table), core, deadline);
  meet(*communicator, *openings, place, options, deadline);
  openings->joined();
  if (!is_part) Meeting(options, place).tidy();
  return communicator;
}

std::shared_ptr<Communicator> join(Transport& transport, const JoinOptions& options,
                                   const Chooser& chooser) {
  Connector* const connector = transport.connector();
  if (connector == nullptr) broken("a mesh is made of connections, and this transport has none");
  // The communicator holds the transport, whose connector opens connections later.
  return join(std::shared_ptr<Connector>(transport.shared_from_this(), connector),
              std::string(transport.name()), options, [&](const std::string&) { return chooser; });
}

}  // namespace weft::transport::mesh
