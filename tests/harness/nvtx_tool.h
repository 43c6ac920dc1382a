// A tool that NVTX's calls of this process reach, as Nsight Systems would be: an injection that
// writes down what comes. One for a process, and for all of its threads.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace weft::harness {

struct NvtxRecording {
  struct Event {
    std::string text;  // "push weft.cuda copy", "pop weft.cuda"
    std::map<std::string, std::string>
        fields;  // of its payload, decoded by the schema that was registered
  };
  std::vector<std::string> domains;
  std::map<std::string, int> registered;  // "weft.cuda copy", and how often
  std::vector<Event> events;

  std::vector<std::string> texts() const;
  // The payloads of events with that text, in their order.
  std::vector<std::map<std::string, std::string>> payloads(const std::string& text) const;
};

// Before something is first traced: NVTX looks for a tool once.
void attach_nvtx_tool();
// What has come since the last time. (The domains stay.)
NvtxRecording take_nvtx_recording();

}  // namespace weft::harness
