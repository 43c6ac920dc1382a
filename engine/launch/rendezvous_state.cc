// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/engine/launch/rendezvous_state.h>

namespace weft::launch {

namespace {

using nlohmann::json;

constexpr std::size_t kMostNodes = 65536;
constexpr std::size_t kLongestText = 4096;  // bytes
constexpr std::size_t kLongestState = std::size_t{16} << 20;

bool contains(const std::vector<std::string>& ids, const std::string& id) {
  return std::ranges::find(ids, id) != ids.end();
}

void add_once(std::vector<std::string>& ids, const std::string& id) {
  if (!contains(ids, id)) ids.push_back(id);
}

std::string text_of(const json& value) {
  const auto text = value.get<std::string>();
  if (text.size() > kLongestText)
    throw Error(Blame::Protocol, "a text of " + std::to_string(text.size()) + " bytes");
  return text;
}

int number_of(const json& value, int least, int most) {
  if (value.is_number_float())
    throw Error(Blame::Protocol, "the number " + value.dump());  // it may exceed every integer type
  const auto number = value.get<std::int64_t>();
  if (number < least || number > most)
    throw Error(Blame::Protocol, "the number " + std::to_string(number));
  return static_cast<int>(number);
}

const json& list_of(const json& value) {
  if (!value.is_array() || value.size() > kMostNodes)
    throw Error(Blame::Protocol, "a field is not a list of nodes");
  return value;
}

std::vector<std::string> ids_of(const json& value) {
  std::vector<std::string> ids;
  for (const json& id : list_of(value)) ids.push_back(text_of(id));
  return ids;
}

// Cuts the text to kLongestText, never in the middle of a UTF-8 character, which JSON could not
// hold.
std::string cut(const std::string& text) {
  std::size_t end = std::min(text.size(), kLongestText);
  while (end < text.size() && end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80)
    --end;
  return text.substr(0, end);
}

}  // namespace

const Node* find(const RendezvousState& state, const std::string& id) {
  const auto found = std::ranges::find(state.nodes, id, &Node::id);
  return found == state.nodes.end() ? nullptr : &*found;
}

std::vector<std::string> all_ids(const RendezvousState& state) {
  std::vector<std::string> ids = state.waiting;
  for (const Node& node : state.nodes) add_once(ids, node.id);
  for (const std::string& id : state.is_running ? std::vector<std::string>() : state.former)
    add_once(ids, id);
  return ids;
}

void agree(RendezvousState& state, const RendezvousLimits& limits) {
  if (!state.limits) state.limits = limits;
  if (state.limits == limits) return;
  const auto nodes_of = [](const RendezvousLimits& some) {
    return "--nnodes " + std::to_string(some.least) +
           (some.most > some.least ? ":" + std::to_string(some.most) : "");
  };
  const auto restarts_of = [](const RendezvousLimits& some) {
    return "--max-restarts " + std::to_string(some.restarts) +
           (some.restarts == 0 ? " (the default)" : "");
  };
  const bool has_other_nodes = nodes_of(*state.limits) != nodes_of(limits);
  const auto text_of = [&](const RendezvousLimits& some) {
    return has_other_nodes ? nodes_of(some) : restarts_of(some);
  };
  throw Error(Blame::Caller, "this node was started with " + text_of(limits) +
                                 ", and the job at this rendezvous with " + text_of(*state.limits) +
                                 "; start all its nodes with the same, or give another job " +
                                 "another --rdzv-id");
}

void come(RendezvousState& state, const Node& node, const RendezvousLimits& limits) {
  const auto known = std::ranges::find(state.nodes, node.id, &Node::id);
  if (state.is_running) {
    if (known == state.nodes.end()) add_once(state.waiting, node.id);
    return;
  }
  if (known != state.nodes.end()) {
    *known = node;
    return;
  }
  // Nodes of the round before keep their places.
  const auto reserved =
      std::ranges::count_if(state.former, [&](const std::string& id) { return !find(state, id); });
  const bool is_former = contains(state.former, node.id);
  const auto taken = static_cast<std::ptrdiff_t>(state.nodes.size()) + (is_former ? 0 : reserved);
  if (taken >= limits.most) return add_once(state.waiting, node.id);
  std::erase(state.waiting, node.id);
  state.nodes.push_back(node);
}

bool is_enough(const RendezvousState& state, const RendezvousLimits& limits) {
  const bool all_came = std::ranges::all_of(
      state.former, [&](const std::string& id) { return find(state, id) != nullptr; });
  return !state.is_running && all_came && static_cast<int>(state.nodes.size()) >= limits.least;
}

void run_if_ready(RendezvousState& state, const RendezvousLimits& limits, bool is_last_call_over) {
  if (!is_enough(state, limits)) return;
  const bool is_full = static_cast<int>(state.nodes.size()) >= limits.most;
  if (!is_full && !is_last_call_over && state.round == 0) return;
  const auto place = [&](const Node& node) {
    const auto former = std::ranges::find(state.former, node.id) - state.former.begin();
    return std::pair(node.wish < 0 ? limits.most : node.wish, former);
  };
  std::ranges::stable_sort(state.nodes, {}, place);
  state.is_running = true;
}

bool has_room_for_more(const RendezvousState& state, const RendezvousLimits& limits) {
  return state.is_running && !state.waiting.empty() &&
         static_cast<int>(state.nodes.size()) < limits.most;
}

void begin_next(RendezvousState& state, const RendezvousLimits& limits, const std::string& cause) {
  ++state.round;
  state.is_running = false;
  state.cause = cut(cause);
  state.former.clear();
  for (const Node& node : std::exchange(state.nodes, {})) state.former.push_back(node.id);
  const auto places = static_cast<std::size_t>(limits.most);
  for (const std::string& id : std::exchange(state.waiting, {})) {
    add_once(state.former.size() < places ? state.former : state.waiting, id);
  }
}

void fail(RendezvousState& state, const RendezvousLimits& limits, const std::string& why,
          int code) {
  if (state.restarts >= limits.restarts) {
    state.end = JobEnd{code, cut(why)};
    return;
  }
  ++state.restarts;
  begin_next(state, limits, why);
}

void finish(RendezvousState& state, const std::string& id) {
  const auto known = std::ranges::find(state.nodes, id, &Node::id);
  if (known == state.nodes.end()) return;
  known->is_done = true;
  if (std::ranges::all_of(state.nodes, &Node::is_done)) state.end = JobEnd{};
}

void remove(RendezvousState& state, const RendezvousLimits& limits, const std::string& id,
            const std::string& how) {
  std::erase(state.waiting, id);
  std::erase(state.former, id);
  const Node* const known = find(state, id);
  if (known == nullptr) return;
  const Node node = *known;
  if (state.end || !state.is_running) {
    std::erase_if(state.nodes, [&](const Node& other) { return other.id == id; });
    return;
  }
  if (node.is_done) return;  // the round does not need it any more
  std::erase_if(state.nodes, [&](const Node& other) { return other.id == id; });
  begin_next(state, limits, "the node at " + node.address + " " + how);
}

std::string encode(const RendezvousState& state) {
  json nodes = json::array();
  for (const Node& node : state.nodes) {
    nodes.push_back({{"id", node.id},
                     {"address", node.address},
                     {"port", node.port},
                     {"ranks", node.ranks},
                     {"wish", node.wish},
                     {"is_done", node.is_done}});
  }
  json value = {
      {"round", state.round},      {"is_running", state.is_running}, {"nodes", nodes},
      {"former", state.former},    {"waiting", state.waiting},       {"cause", state.cause},
      {"restarts", state.restarts}};
  if (state.limits) {
    value["limits"] = {{"least", state.limits->least},
                       {"most", state.limits->most},
                       {"restarts", state.limits->restarts}};
  }
  if (state.end) value["end"] = {{"code", state.end->code}, {"why", state.end->why}};
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

RendezvousState decode(const std::string& text) {
  constexpr int kMost = std::numeric_limits<int>::max();
  try {
    if (text.size() > kLongestState)
      throw Error(Blame::Protocol, std::to_string(text.size()) + " bytes");
    const json value = json::parse(text);
    RendezvousState state;
    state.round = number_of(value.at("round"), 0, kMost - 1);
    state.is_running = value.at("is_running").get<bool>();
    for (const json& node : list_of(value.at("nodes"))) {
      state.nodes.push_back({.id = text_of(node.at("id")),
                             .address = text_of(node.at("address")),
                             .port = number_of(node.at("port"), 0, 65535),
                             .ranks = number_of(node.at("ranks"), 1, 65536),
                             .wish = number_of(node.at("wish"), -1, 65536),
                             .is_done = node.at("is_done").get<bool>()});
    }
    state.former = ids_of(value.at("former"));
    state.waiting = ids_of(value.at("waiting"));
    state.cause = text_of(value.at("cause"));
    state.restarts = number_of(value.at("restarts"), 0, kMost - 1);
    if (value.contains("limits")) {
      const json& limits = value.at("limits");
      state.limits = RendezvousLimits{.least = number_of(limits.at("least"), 1, 65536),
                                      .most = number_of(limits.at("most"), 1, 65536),
                                      .restarts = number_of(limits.at("restarts"), 0, kMost)};
    }
    if (value.contains("end")) {
      const json& end = value.at("end");
      state.end = JobEnd{number_of(end.at("code"), 0, 255), text_of(end.at("why"))};
    }
    return state;
  } catch (const json::exception& error) {
    throw Error(Blame::Protocol,
                std::string("the rendezvous' state in the store cannot be read: ") + error.what());
  } catch (const Error& error) {
    throw error.within("the rendezvous' state in the store cannot be read");
  }
}

}  // namespace weft::launch
