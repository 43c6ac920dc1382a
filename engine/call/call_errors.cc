// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/call/call_errors.h>
#include <weft/engine/call/core.h>

namespace weft::call {

namespace {

// Says why a reply is late, as far as this side knows.
std::string why_late(AgentCore& core, const WaitingCall& call) {
  if (call.here) {
    return call.here->has_begun
               ? "; its function still runs"
               : "; it waits for one of this worker's threads (rpc::Options::worker_threads)";
  }
  if (!call.note.empty()) return "; " + call.note;
  const auto worker = core.connections().known_peer(call.to);
  const auto standing = worker ? worker->standing_connection() : Peer::Numbered();
  if (!standing.connection || standing.number != call.connection_number) return "";
  const std::string way(standing.connection->transport());
  if (worker->has_heard_by(standing.number)) {
    return "; the connection (" + way +
           ") works: its function runs there, or waits for a thread there "
           "(rpc::Options::worker_threads of that worker)";
  }
  const bool is_of_network = way == "tcp" || way == "verbs";
  return "; nothing has come from that worker yet by " + way + " (" + standing.connection->peer() +
         "): its function runs there, " +
         (is_of_network
              ? "or the connection is not made, because a firewall drops it or the address is "
                "another machine's (set WEFT_SOCKET_IFNAME there to an interface that can be "
                "reached from here)"
              : "or its process is stopped");
}

}  // namespace

std::string in_words(AgentCore& core, const Function* function, const std::string& to) {
  return (function != nullptr ? function->name : "a call") + " on " + to + ", called by " +
         describe(core.self());
}

Error not_in_time(AgentCore& core, const WaitingCall& call, const std::string& to) {
  return Error(Blame::Timeout, in_words(core, call.function, to) + ": no reply within " +
                                   weft::describe(call.limit) + why_late(core, call) +
                                   "; rpc::to(worker).timeout(…) gives one call longer, "
                                   "rpc::Agent::set_timeout() all")
      .with_ranks({call.to});
}

Error left(AgentCore& core, const WaitingCall& call, const std::string& to) {
  return core.lifetime().why_gone().within(in_words(core, call.function, to));
}

Error gone(AgentCore& core, const Error& why, int rank) {
  if (why.blame() != Blame::PeerLost) return why;
  return why
      .with_text(core.connections().name_of(rank) + " has left, or its process has ended (" +
                 why.text() + ")")
      .with_ranks({rank});
}

}  // namespace weft::call
