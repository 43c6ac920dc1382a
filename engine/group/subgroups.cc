// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/engine/group/arguments.h>
#include <weft/engine/group/backends.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/store_meeting.h>
#include <weft/engine/group/subgroups.h>
#include <weft/engine/group/text_meeting.h>
#include <weft/engine/membership/majority.h>
#include <weft/engine/membership/still_listens.h>
#include <weft/profiling/trace/trace.h>

namespace weft::group {

namespace {

// How long new_group may take to see which of the lost ranks have ended.
constexpr auto kEndIsKnown = std::chrono::seconds(10);

// The numbers that ranks exchange in split(), as "color key".
struct Split {
  int color = 0;
  int key = 0;
};

std::string encode(const Split& split) {
  return std::to_string(split.color) + " " + std::to_string(split.key);
}

Split decode(const std::string& text) {
  Split split;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, split.color);
  if (first.ptr == end || std::from_chars(first.ptr + 1, end, split.key).ec != std::errc()) {
    throw Error(Blame::Protocol,
                "split: '" + text + "' in the group's store is not a color and a key");
  }
  return split;
}

// A list of ranks for names: "3,0,2", "0-7", "0-1016:8". Different lists have different texts.
std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    const int step = first + 1 < ranks.size() ? ranks[first + 1] - ranks[first] : 0;
    while (last + 1 < ranks.size() && ranks[last + 1] - ranks[last] == step) ++last;
    if (last < first + 2) last = first;  // two ranks are no range
    text += (first == 0 ? "" : ",") + std::to_string(ranks[first]);
    if (last > first)
      text += "-" + std::to_string(ranks[last]) + (step == 1 ? "" : ":" + std::to_string(step));
    first = last + 1;
  }
  return text;
}

namespace traced {
constinit trace::Name make_group{trace::Layer::Engine, "make a group"};
}  // namespace traced

// `ranks` are ranks of the group `core`, in the order of their new ranks.
ProcessGroup make_subgroup(Core& core, const std::vector<int>& ranks, const std::string& prefix,
                           CoreOptions made) {
  const auto own = std::find(ranks.begin(), ranks.end(), core.options.rank);
  if (own == ranks.end()) return {};
  made.said_by.clear();
  made.rank = static_cast<int>(own - ranks.begin());
  made.size = static_cast<int>(ranks.size());
  made.global_ranks.clear();
  for (const int rank : ranks)
    made.global_ranks.push_back(core.options.global_ranks[static_cast<std::size_t>(rank)]);
  made.store = c10::make_intrusive<c10d::PrefixStore>(prefix, core.options.store);
  made.own_store = kept_by_members(made);
  if (!made.own_store)
    made.own_store = c10::make_intrusive<c10d::PrefixStore>(prefix, core.options.own_store);
  return Core::make(made, &core);
}

void check_ranks(const Core& core, const std::vector<int>& ranks,
                 const ProcessGroupOptions& wanted) {
  const auto refuse = [&](const std::string& why) {
    throw Error(Blame::Caller, "new_group " + core.options.place() + ": " + why);
  };
  if (ranks.empty()) refuse("no ranks are given");
  if (wanted.timeout <= std::chrono::milliseconds(0))
    refuse("the timeout is " + describe(wanted.timeout));
  std::vector<bool> named(static_cast<std::size_t>(core.options.size));
  for (const int rank : ranks) {
    core.options.check_rank(rank, "new_group:");
    if (named[static_cast<std::size_t>(rank)])
      refuse("rank " + std::to_string(rank) + " is named twice");
    named[static_cast<std::size_t>(rank)] = true;
  }
}

// The options of a new group, without those that depend on its ranks. Checks the user's options.
CoreOptions options_for(const Core& core, const ProcessGroupOptions& wanted) {
  CoreOptions made = core.options;
  made.place_in_mesh.clear();
  if (!wanted.backend.empty()) {
    // Every rank checks this, also ranks that are not in the new group.
    static_cast<void>(parse_backends(wanted.backend));
    made.backend = wanted.backend;
  }
  if (wanted.device) {
    check_device(*wanted.device, core.options.job->devices->count());
    made.device = *wanted.device;
    if (made.device.is_cuda() && !made.device.has_index()) {
      made.device.set_index(core.options.device.is_cuda() ? core.options.device.index() : 0);
    }
  }
  if (wanted.timeout != ProcessGroupOptions().timeout)
    made.timeout = std::min(wanted.timeout, kLongestTimeout);
  return made;
}

void throw_if_names_lost(const Core& core, const std::vector<int>& ranks, const Error& loss) {
  const std::vector<int> living = core.ledger->living();
  for (const int rank : ranks) {
    if (std::find(living.begin(), living.end(), rank) != living.end()) continue;
    throw loss.with_text(loss.text() + " (new_group names rank " + std::to_string(rank) +
                         ", which is lost or has left)");
  }
}

// Throws if this rank's part of the group, which has lost sight of another part, must not go on.
void require_majority(const Core& core, const Error& loss) {
  std::vector<Sight> ranks;
  std::vector<std::size_t> asked;  // places in `ranks` of those that may have ended
  std::vector<Published> addresses;
  for (const int rank : core.options.global_ranks) {
    const auto gone = core.options.job->membership->gone(rank);
    if (gone && !gone->is_cut && gone->address) {
      asked.push_back(ranks.size());
      addresses.push_back(*gone->address);
    }
    ranks.push_back(!gone ? Sight::Here : gone->is_cut ? Sight::Cut : Sight::Ended);
  }
  const auto listen = still_listen(addresses, Deadline::in(kEndIsKnown));
  for (std::size_t i = 0; i < asked.size(); ++i) {
    if (listen[i]) ranks[asked[i]] = Sight::Cut;
  }
  if (has_majority(ranks)) return;
  const auto reached = std::count(ranks.begin(), ranks.end(), Sight::Here);
  throw loss.with_text(
      loss.text() + " (new_group: this rank reaches " + std::to_string(reached) + " of " +
      std::to_string(core.options.size) +
      " ranks; others do not answer and have not ended, and may go on as the group; restart the "
      "job)");
}

// Makes a group of ranks that live, after the loss of another.
ProcessGroup make_after(const Error& loss, Core& core, const std::vector<int>& ranks,
                        const std::string& prefix, CoreOptions made) {
  try {
    return make_subgroup(core, ranks, prefix, std::move(made));
  } catch (const Error& error) {
    if (error.blame() != Blame::PeerLost) throw;
    // The lost rank is named again, or it hosted the store, or the ranks were connected through it.
    if (error.text() == loss.text()) throw;
    throw loss.with_text(loss.text() + " (new_group: " + error.text() + ")");
  }
}

// Makes the group of this rank's color in the `count`-th split() of the group `core`.
ProcessGroup divide(Core& core, int count, int color, int key) {
  const std::string number = std::to_string(count);
  TextMeeting meeting(core, "split", count);
  meeting.give(encode(Split{color, key}));
  std::vector<std::pair<int, int>> members;  // key, rank
  const std::vector<std::string> texts = meeting.texts_by_first();
  for (int rank = 0; rank < core.options.size; ++rank) {
    const Split theirs = decode(texts[static_cast<std::size_t>(rank)]);
    if (theirs.color == color) members.emplace_back(theirs.key, rank);
  }
  if (color < 0) return {};
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [place, rank] : members) ranks.push_back(rank);
  CoreOptions made = core.options;
  made.place_in_mesh.clear();
  made.name = core.options.name + "/split" + number + "." + std::to_string(color);
  return make_subgroup(core, ranks, "split" + number + "/" + std::to_string(color) + "/",
                       std::move(made));
}

}  // namespace

ProcessGroup new_group(Core& core, const std::vector<int>& ranks,
                       const ProcessGroupOptions& wanted) {
  const std::optional<Error> loss = core.failure.loss();
  if (!loss) core.operations.throw_if_refused();
  const trace::Range range(traced::make_group,
                           {.rank = core.options.rank, .ranks = core.options.size});
  check_ranks(core, ranks, wanted);
  CoreOptions made = options_for(core, wanted);
  // The names are checked before the store is queried, since it may end with the ranks that see
  // this error first.
  if (loss) {
    throw_if_names_lost(core, ranks, *loss);
    require_majority(core, *loss);
  }
  // The group is counted after all checks, so that a rank whose call was refused is in step when it
  // calls again. It is counted by its members, so that other ranks need not call, and may call for
  // groups in another order.
  const std::string members = listed(ranks);
  const int nth = core.numbers.next("group " + members);
  made.name = core.options.name + "/" + members + (nth == 1 ? "" : "#" + std::to_string(nth)) +
              (wanted.group_name.empty() ? "" : "." + wanted.group_name);
  const std::string prefix = "group/" + members + "/" + std::to_string(nth) + "/";
  const auto count = static_cast<std::uint64_t>(core.numbers.next("group"));
  return recorded(core.member, "new_group", count, core.options.place(), [&] {
    return loss ? make_after(*loss, core, ranks, prefix, std::move(made))
                : make_subgroup(core, ranks, prefix, std::move(made));
  });
}

ProcessGroup split(Core& core, int color, int key) {
  core.operations.throw_if_refused();
  const trace::Range range(traced::make_group,
                           {.rank = core.options.rank, .ranks = core.options.size});
  const int count = core.numbers.next("split");
  return recorded(core.member, "split", static_cast<std::uint64_t>(count), core.options.place(),
                  [&] {
                    ProcessGroup made;
                    core.failure.by_the_store([&] { made = divide(core, count, color, key); });
                    return made;
                  });
}

ProcessGroup make_part(const ProcessGroup& parent, const MeshPart& part) {
  Core& core = Core::of(parent);
  core.operations.throw_if_refused();
  const trace::Range range(traced::make_group,
                           {.rank = core.options.rank, .ranks = core.options.size});
  CoreOptions made = core.options;
  made.name = core.options.name + "/" + part.name;
  made.place_in_mesh = part.place;
  const auto count = static_cast<std::uint64_t>(core.numbers.next("group"));
  auto group = recorded(core.member, "new_group", count, core.options.place(), [&] {
    return make_subgroup(core, part.ranks, part.name + "/", std::move(made));
  });
  // The flight recorder, the timeline and the metrics show operations by the group's name; this
  // adds the place that its errors name.
  trace::Operation::note(Core::of(group).member, trace::Kind::Meeting,
                         {.name = trace::keep(part.place)});
  return group;
}

}  // namespace weft::group
