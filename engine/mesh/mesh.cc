// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/subgroups.h>
#include <weft/engine/group/text_meeting.h>
#include <weft/engine/mesh/layout.h>
#include <weft/engine/mesh/mesh.h>
#include <weft/profiling/trace/progress.h>
#include <weft/profiling/trace/timeline_data.h>

namespace weft {

using mesh::Indices;
using mesh::Layout;
using mesh::text_of;

namespace {

std::string mesh_on(const ProcessGroup& group) { return "Mesh " + group::place_of(group); }

// The arguments of one rank's constructor, as the ranks exchange them: a line for whether its axes
// can be used on their own, one for its host, and one for the axes or what is wrong with them.
struct Passed {
  bool is_usable = false;
  std::string host;
  std::string text;
};

std::string encode(const Passed& passed) {
  return std::string(passed.is_usable ? "axes" : "error") + "\n" + passed.host + "\n" + passed.text;
}

Passed decode(const std::string& text) {
  const auto first = text.find('\n');
  const auto second = first == std::string::npos ? first : text.find('\n', first + 1);
  const std::string kind = text.substr(0, first);
  if (second == std::string::npos || (kind != "axes" && kind != "error")) {
    throw Error(Blame::Protocol, "Mesh: '" + text.substr(0, 80) +
                                     "' in the group's store is not what a rank of a mesh writes; "
                                     "run one version of Weft on all ranks");
  }
  return {kind == "axes", text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

// The host's name, and what tells it from another host of that name.
std::string this_host() {
  std::string host =
      trace::host_name() + " (" + trace::timeline::host_identity().substr(0, 8) + ")";
  std::replace(host.begin(), host.end(), '\n', ' ');
  return host;
}

// The error of ranks that have not all passed the same usable axes; nullopt if they have.
std::optional<Error> difference(const std::vector<Passed>& all) {
  std::map<std::string, std::vector<int>> by_text;
  std::vector<int> others;  // ranks that differ from rank 0, or whose axes are wrong
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Passed& one = all[rank];
    by_text[(one.is_usable ? "passed " : "passed axes that are refused: ") + one.text].push_back(
        static_cast<int>(rank));
    if (!one.is_usable || one.text != all.front().text) others.push_back(static_cast<int>(rank));
  }
  if (others.empty()) return std::nullopt;
  std::string text = "the ranks passed different axes: ";
  for (const auto& [passed, ranks] : by_text) text += ranks_text(ranks) + " " + passed + "; ";
  return Error(Blame::Caller, text + "pass the same axes on all ranks").with_ranks(others);
}

// Compares the axes of all ranks. Returns the layout, and the hosts by rank.
std::pair<Layout, std::vector<std::string>> agree_on(const ProcessGroup& group,
                                                     const std::vector<MeshAxis>& axes,
                                                     group::TextMeeting& meeting) {
  std::optional<Layout> layout;
  try {
    layout.emplace(axes, group.size());
  } catch (const Error& error) {
    meeting.give(encode({false, this_host(), error.text()}));
    meeting.await_readers();
    throw error.within(mesh_on(group));
  }
  meeting.give(encode({true, this_host(), text_of(layout->axes())}));
  std::vector<Passed> all;
  for (const std::string& text : meeting.meet()) all.push_back(decode(text));
  if (const auto error = difference(all)) {
    meeting.await_readers();
    throw error->within(mesh_on(group));
  }
  std::vector<std::string> hosts;
  for (const Passed& one : all) hosts.push_back(one.host);
  return {std::move(*layout), std::move(hosts)};
}

}  // namespace

struct Mesh::Whole {
  Whole(ProcessGroup all, const std::vector<MeshAxis>& axes, group::TextMeeting meeting)
      : Whole(all, agree_on(all, axes, meeting), meeting.number()) {}
  Whole(ProcessGroup all, const std::pair<Layout, std::vector<std::string>>& agreed, int count)
      : group(std::move(all)), rank(group.rank()), layout(agreed.first), number(count) {
    if (rank == 0) {
      if (const auto warning = crossing_hosts(layout, agreed.second))
        log::warn(mesh_on(group) + ": " + *warning);
    }
    for (std::size_t axis = 0; axis < layout.axes().size(); ++axis)
      along.push_back(make({axis}, 1));
  }

  // `attempt`: 1, or more if this rank has tried before.
  ProcessGroup make(const Indices& axes, int attempt) const {
    return group::make_part(
        group, {.ranks = layout.part(rank, axes),
                .name = "mesh" + std::to_string(number) + "/" + layout.name(rank, axes) +
                        (attempt == 1 ? "" : "#" + std::to_string(attempt)),
                .place = layout.place(rank, axes)});
  }

  ProcessGroup flat(const Indices& axes) {
    if (axes.size() == layout.axes().size()) return group;
    if (axes.size() == 1) return along[axes.front()];
    Flattened& flattened = of(axes);
    MutexLock lock(flattened.making);
    if (!flattened.group) flattened.group = make(axes, ++flattened.attempts);
    return flattened.group;
  }

  const ProcessGroup group;
  const int rank;
  const Layout layout;
  const int number;                 // counts the meshes of the group
  std::vector<ProcessGroup> along;  // by axis

 private:
  struct Flattened {
    Mutex making;  // held while the group is made, which blocks until the other ranks have come
    ProcessGroup group WEFT_GUARDED_BY(making);
    int attempts WEFT_GUARDED_BY(making) = 0;
  };
  Flattened& of(const Indices& axes) {
    MutexLock lock(mutex_);
    return flattened_[axes];
  }

  Mutex mutex_;
  std::map<Indices, Flattened> flattened_ WEFT_GUARDED_BY(mutex_);
};

Mesh::Mesh(ProcessGroup group, std::vector<MeshAxis> axes) {
  group::TextMeeting meeting(group, "Mesh");
  whole_ = std::make_shared<Whole>(std::move(group), axes, std::move(meeting));
  axes_.resize(whole_->layout.axes().size());
  std::iota(axes_.begin(), axes_.end(), std::size_t{0});
}

Mesh::Mesh(std::shared_ptr<Whole> whole, std::vector<std::size_t> axes)
    : whole_(std::move(whole)), axes_(std::move(axes)) {}

Mesh::Whole& Mesh::whole() const {
  if (!whole_) throw Error(Blame::Caller, "this Mesh is empty: it was moved from");
  return *whole_;
}

std::vector<MeshAxis> Mesh::axes() const {
  const std::vector<MeshAxis>& all = whole().layout.axes();
  std::vector<MeshAxis> mine;
  for (const std::size_t axis : axes_) mine.push_back(all[axis]);
  return mine;
}

std::size_t Mesh::find(const std::string& axis) const {
  const std::vector<MeshAxis>& all = whole().layout.axes();
  for (const std::size_t one : axes_) {
    if (all[one].name == axis) return one;
  }
  throw Error(Blame::Caller, mesh_on(whole().group) + ": there is no axis '" + axis +
                                 "'; the axes are " + text_of(axes()));
}

std::vector<std::size_t> Mesh::find_all(const std::vector<std::string>& names,
                                        const char* call) const {
  const auto refuse = [&](const std::string& why) {
    throw Error(Blame::Caller, mesh_on(whole().group) + ": " + call + ": " + why +
                                   "; the axes are, in this order, " + text_of(axes()));
  };
  if (names.empty()) refuse("no axis is named");
  std::vector<std::size_t> found;
  for (const std::string& name : names) {
    const std::size_t axis = find(name);
    if (std::find(found.begin(), found.end(), axis) != found.end())
      refuse("axis '" + name + "' is named twice");
    if (!found.empty() && axis < found.back())
      refuse("name axes in the mesh's order, '" + name + "' before '" +
             whole().layout.axes()[found.back()].name + "'");
    found.push_back(axis);
  }
  return found;
}

ProcessGroup Mesh::operator[](const std::string& axis) const { return whole().along[find(axis)]; }

int Mesh::size(const std::string& axis) const { return whole().layout.axes()[find(axis)].ranks; }

int Mesh::coordinate(const std::string& axis) const {
  return whole().layout.coordinate(whole().rank, find(axis));
}

Mesh Mesh::slice(std::vector<std::string> axes) const { return {whole_, find_all(axes, "slice")}; }

ProcessGroup Mesh::flatten(std::vector<std::string> axes) const {
  return whole().flat(find_all(axes, "flatten"));
}

ProcessGroup Mesh::group() const { return whole().flat(axes_); }

}  // namespace weft
