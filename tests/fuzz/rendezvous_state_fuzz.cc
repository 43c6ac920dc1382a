// SPDX-License-Identifier: Apache-2.0
// The state of a job's rendezvous comes from other machines, by way of a store. Any text is either
// a state, which is unchanged when it is written and read again, or is refused with Protocol. From
// any state, nodes that join, leave, fail and finish lead to a state that can be written.
#include <cstdint>
#include <string>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/launch/rendezvous_state.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft;
  using namespace weft::launch;
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  RendezvousState state;
  try {
    state = decode(text);
  } catch (const Error& error) {
    if (error.blame() != Blame::Protocol)
      broken("a state that cannot be read is not blamed on the peer");
    return 0;
  }
  if (decode(encode(state)) != state) broken("a state changes when it is written");
  const RendezvousLimits limits{.least = 1, .most = 3, .restarts = 2};
  const Node self{.id = "self", .address = "here", .port = 1, .ranks = 1};
  come(state, self, limits);
  run_if_ready(state, limits, true);
  if (state.is_running && find(state, self.id) != nullptr && !state.end)
    fail(state, limits, "a rank failed", 1);
  come(state, self, limits);
  for (const std::string& id : all_ids(state)) remove(state, limits, id, "is lost");
  come(state, self, limits);
  run_if_ready(state, limits, true);
  finish(state, self.id);
  if (decode(encode(state)) != state) broken("a state that changed cannot be read");
  return 0;
}
