// SPDX-License-Identifier: Apache-2.0
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
  const Meeting meeting(options, place);
  std::shared_ptr<Openings> openings;
  try {
    openings = Openings::make(connector, options, place, reroute);
  } catch (const Error& error) {
    throw error.within(place);
  }
  Table table = meeting.hold(openings->address(), *connector, deadline);
  require_reach(*connector, table, options.rank, place);
  const auto core =
      std::make_shared<Core>(options, name_of(*connector, backend, table, options.rank),
                             chooser_of(table.transport), openings, Layout(table.hosts));
  if (options.rank == 0 && core->layout.has_levels()) {
    log::debug(place + ": collectives are done in two levels, within and between " +
               std::to_string(core->layout.hosts()) + " hosts");
  }
  const auto communicator = std::make_shared<MeshCommunicator>(core);
  openings->begin(std::move(table), core, deadline);
  meet(*communicator, *openings, place, options, deadline);
  openings->joined();
  meeting.tidy();
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
