// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <tuple>

#include <weft/profiling/tools/messages.h>

namespace weft::tools {

namespace {

// By from, to and tag; then by number.
using Lanes = std::map<std::tuple<int, int, int>, std::map<std::uint64_t, Message>>;

void mark_passed(std::map<std::uint64_t, Message>& lane) {
  bool sends = false;
  bool receives = false;
  for (auto next = lane.rbegin(); next != lane.rend(); ++next) {
    Message& message = next->second;
    message.is_passed = message.send == nullptr ? sends : receives && message.receive == nullptr;
    sends |= message.send != nullptr;
    receives |= message.receive != nullptr;
  }
}

// Returns the first send without a known receive.
Message* without_receive(Lanes& lanes, int to, int tag) {
  for (auto& [ends, lane] : lanes) {
    if (std::get<1>(ends) != to || std::get<2>(ends) != tag) continue;
    for (auto& [number, message] : lane) {
      if (message.receive == nullptr && !message.is_passed) return &message;
    }
  }
  return nullptr;
}

}  // namespace

std::vector<Message> messages_of(const Group& group) {
  Lanes lanes;
  std::vector<Message> from_any;
  for (const auto& [rank, view] : group.views) {
    for (const Record& record : view.records) {
      const bool is_send = record.kind == "send";
      if (!is_send && record.kind != "receive") continue;
      Message one{is_send ? rank : record.peer, is_send ? record.peer : rank, record.tag,
                  record.sequence};
      (is_send ? one.send : one.receive) = &record;
      if (record.peer < 0) {
        if (!is_send) from_any.push_back(one);
        continue;
      }
      Message& known =
          lanes[{one.from, one.to, one.tag}].try_emplace(one.number, one).first->second;
      (is_send ? known.send : known.receive) = &record;
    }
  }
  for (auto& [ends, lane] : lanes) mark_passed(lane);
  std::vector<Message> messages;
  for (const Message& one : from_any) {
    if (Message* sent = without_receive(lanes, one.to, one.tag)) {
      sent->receive = one.receive;
      sent->is_guessed = true;
    } else {
      messages.push_back(one);
    }
  }
  for (const auto& [ends, lane] : lanes) {
    for (const auto& [number, message] : lane) messages.push_back(message);
  }
  return messages;
}

}  // namespace weft::tools
