// SPDX-License-Identifier: Apache-2.0
// A tool that receives this process's NVTX calls, as Nsight Systems would: an injection that
// records them. One for the process and all of its threads.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace weft::harness {

struct NvtxRecording {
  struct Event {
    std::string text;  // "push weft.cuda copy", "pop weft.cuda"
    // The fields of its payload, decoded by the registered schema.
    std::map<std::string, std::string> fields;
  };
  std::vector<std::string> domains;
  std::map<std::string, int> registered;  // how often each string was registered: "weft.cuda copy"
  std::vector<Event> events;

  std::vector<std::string> texts() const;
  // Returns the payloads of the events with that text, in order.
  std::vector<std::map<std::string, std::string>> payloads(const std::string& text) const;
};

// Call it before anything is traced, because NVTX looks for a tool only once.
void attach_nvtx_tool();
// Returns the calls recorded since the last time. (The domains stay.)
NvtxRecording take_nvtx_recording();

}  // namespace weft::harness
