// SPDX-License-Identifier: Apache-2.0
#include <weft/base/make_error.h>
#include <weft/transport/mesh/meeting.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/mesh/mesh_communicator.h>

namespace weft::transport::mesh {

std::shared_ptr<Communicator> join(Transport& transport, const JoinOptions& options,
                                   const Chooser& chooser) {
  Connector* const connector = transport.connector();
  if (connector == nullptr) broken("a mesh is made of connections, and this transport has none");
  const Deadline deadline = Deadline::in(options.timeout);
  const auto core = std::make_shared<Core>(options, std::string(transport.name()), chooser);
  const auto communicator = std::make_shared<MeshCommunicator>(core);
  const auto meeting = std::make_shared<Meeting>(*connector, options, core);
  try {
    meeting->hold(deadline);
  } catch (...) {
    meeting->close();  // connections and the meeting refer to each other
    throw;
  }
  meeting->close();
  // After this barrier all ranks have joined, so none of them needs the store any more.
  const Op met = communicator->barrier(Fence());
  if (!met.done().synchronize(deadline)) {
    throw Error(Blame::Timeout, "joining " + core->place + ": not all ranks joined within " +
                                    weft::describe(options.timeout));
  }
  if (const auto error = met.error()) throw *error;
  meeting->tidy();
  return communicator;
}

}  // namespace weft::transport::mesh
