// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include <weft/profiling/tools/wording.h>

namespace weft::tools {

std::string list_ranks(const std::vector<int>& ranks, const std::string& what) {
  std::string text = what + (ranks.size() == 1 ? " " : "s ");
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string duration_text(std::int64_t nanoseconds) {
  char text[32];
  const double seconds = static_cast<double>(nanoseconds) * 1e-9;
  std::snprintf(text, sizeof text, seconds < 1 ? "%.1f ms" : "%.1f s",
                seconds < 1 ? seconds * 1e3 : seconds);
  return text;
}

std::string title(const Group& group) { return "group '" + group.name + "'"; }

std::string call_of(const Record& collective) {
  std::string how = collective.reduction;
  if (collective.peer >= 0)
    how += (how.empty() ? "root " : ", root ") + std::to_string(collective.peer);
  const std::string tensor = tensor_of(collective);
  return collective.name + (how.empty() ? "" : " (" + how + ")") +
         (tensor.empty() ? "" : " of " + tensor);
}

std::string describe(const Record& record, const std::string& agent) {
  if (record.kind == "collective") {
    const std::string by = record.called_by.empty() ? "" : " for " + record.called_by;
    return "collective #" + std::to_string(record.sequence) + ", " + call_of(record) + by;
  }
  const std::string tensor = tensor_of(record);
  std::string text = record.name;
  if (record.kind == "meeting") text += " #" + std::to_string(record.sequence);
  if (record.kind == "send")
    text += " #" + std::to_string(record.sequence) + " to rank " + std::to_string(record.peer);
  if (record.kind == "receive")
    text += record.peer < 0 ? " from any rank"
                            : " #" + std::to_string(record.sequence) + " from rank " +
                                  std::to_string(record.peer);
  if (record.kind == "call")
    text = "the call of " + text + " on " + agent + " " + std::to_string(record.peer);
  if (record.kind == "served") text += ", called by " + agent + " " + std::to_string(record.peer);
  if (record.tag != 0) text += " with tag " + std::to_string(record.tag);
  return text + (tensor.empty() ? "" : " of " + tensor);
}

namespace {
constexpr const char* kShutdown = "weft::rpc::internal::";
}

bool is_of_shutdown(const Record& record) {
  const bool is_call = record.kind == "call" || record.kind == "served";
  return is_call && record.name.starts_with(kShutdown);
}

bool is_control(const std::string& function) {
  if (function == "weft::autograd::internal::gradient") return false;
  return function.starts_with(kShutdown) || function.starts_with("weft::rref::internal::") ||
         function.starts_with("weft::autograd::internal::");
}

}  // namespace weft::tools
