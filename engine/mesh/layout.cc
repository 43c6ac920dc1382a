// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <set>
#include <string_view>
#include <utility>

#include <weft/base/make_error.h>
#include <weft/engine/mesh/layout.h>

namespace weft::mesh {

namespace {

constexpr std::int64_t kMostRanks = std::int64_t{1} << 31;  // products stop there

[[noreturn]] void refuse(const std::string& why) { throw Error(Blame::Caller, why); }

// "a", "a or b", "a, b or c".
std::string either(const std::vector<std::string>& texts) {
  std::string all;
  for (std::size_t i = 0; i < texts.size(); ++i)
    all += (i == 0 ? "" : i + 1 == texts.size() ? " or " : ", ") + texts[i];
  return all;
}

void check_names(const std::vector<MeshAxis>& axes) {
  if (axes.empty()) refuse("no axes are given; give at least one, such as {\"shard\", -1}");
  std::set<std::string> known;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const std::string& name = axes[i].name;
    if (name.empty())
      refuse("axis " + std::to_string(i) + " (of " + text_of(axes) + ") has no name");
    const bool is_bad = std::any_of(name.begin(), name.end(), [](char letter) {
      return static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f ||
             std::string_view("/[],'\"").find(letter) != std::string_view::npos;
    });
    if (is_bad) {
      refuse("the name of axis " + std::to_string(i) +
             " contains a control character or one of / [ ] , ' and \", which separate names");
    }
    if (!known.insert(name).second) refuse("two axes have the name '" + name + "'");
  }
}

// The ranks of all axes except `but`, multiplied.
std::int64_t product(const std::vector<MeshAxis>& axes, const MeshAxis* but = nullptr) {
  std::int64_t ranks = 1;
  for (const MeshAxis& axis : axes) {
    if (&axis != but) ranks = std::min(ranks * axis.ranks, kMostRanks);
  }
  return ranks;
}

std::string count(std::int64_t ranks) {
  return (ranks == kMostRanks ? "at least " : "") + std::to_string(ranks);
}

// The one axis with -1, or null.
MeshAxis* rest_of(std::vector<MeshAxis>& axes) {
  MeshAxis* rest = nullptr;
  for (MeshAxis& axis : axes) {
    if (axis.ranks >= 1) continue;
    if (axis.ranks != -1) {
      refuse("axis '" + axis.name + "' has " + std::to_string(axis.ranks) +
             " ranks; an axis has at least 1, or -1 for as many as are left");
    }
    if (rest != nullptr) {
      refuse("the axes '" + rest->name + "' and '" + axis.name +
             "' both have -1 ranks; at most one axis may take what is left");
    }
    rest = &axis;
  }
  return rest;
}

void fill(const std::vector<MeshAxis>& axes, MeshAxis& rest, int ranks) {
  const std::int64_t others = product(axes, &rest);
  if (ranks % others == 0) {
    rest.ranks = static_cast<int>(ranks / others);
    return;
  }
  std::vector<std::string> fitting;
  for (int some = 1; some <= ranks; ++some) {
    if (ranks % some == 0) fitting.push_back(std::to_string(some));
  }
  refuse("in " + text_of(axes) + ", axis '" + rest.name + "' cannot take what is left: " +
         count(others) + " ranks of the other axes do not divide the group's " +
         std::to_string(ranks) + "; together they may have " + either(fitting));
}

void check_product(const std::vector<MeshAxis>& axes, int ranks) {
  const std::int64_t all = product(axes);
  if (all == ranks) return;
  std::vector<std::string> fitting;
  for (const MeshAxis& axis : axes) {
    const std::int64_t others = product(axes, &axis);
    if (ranks % others == 0) {
      std::vector<MeshAxis> changed = axes;
      changed[static_cast<std::size_t>(&axis - axes.data())].ranks =
          static_cast<int>(ranks / others);
      fitting.push_back(text_of(changed));
    }
  }
  refuse(text_of(axes) + " make " + count(all) + " ranks, and the group has " +
         std::to_string(ranks) + "; " +
         (fitting.empty() ? "give numbers whose product is " + std::to_string(ranks) +
                                ", one of them as -1 (what is left)"
                          : either(fitting) + " would fit"));
}

}  // namespace

std::string text_of(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes)
    text += (text.empty() ? "" : ", ") + axis.name + " (" + std::to_string(axis.ranks) + ")";
  return text;
}

Layout::Layout(std::vector<MeshAxis> axes, int ranks) : axes_(std::move(axes)) {
  check_names(axes_);
  if (MeshAxis* const rest = rest_of(axes_)) {
    fill(axes_, *rest, ranks);
  } else {
    check_product(axes_, ranks);
  }
}

int Layout::coordinate(int rank, std::size_t axis) const {
  for (std::size_t i = axes_.size() - 1; i > axis; --i) rank /= axes_[i].ranks;
  return rank % axes_[axis].ranks;
}

std::vector<int> Layout::part(int rank, const Indices& axes) const {
  std::vector<int> ranks{rank};
  int stride = 1;
  std::vector<int> strides(axes_.size());
  for (std::size_t i = axes_.size(); i-- > 0; stride *= axes_[i].ranks) strides[i] = stride;
  for (const std::size_t axis : axes) {
    std::vector<int> more;
    for (const int one : ranks) {
      const int first = one - coordinate(one, axis) * strides[axis];
      for (int i = 0; i < axes_[axis].ranks; ++i) more.push_back(first + i * strides[axis]);
    }
    ranks = std::move(more);
  }
  return ranks;
}

std::string Layout::others(int rank, const Indices& axes) const {
  std::string text;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (std::find(axes.begin(), axes.end(), i) != axes.end()) continue;
    text += (text.empty() ? " of " : ", ") + axes_[i].name + "[" +
            std::to_string(coordinate(rank, i)) + "]";
  }
  return text;
}

std::string Layout::name(int rank, const Indices& axes) const {
  std::string text;
  for (const std::size_t axis : axes) text += (text.empty() ? "" : ", ") + axes_[axis].name;
  return text + others(rank, axes);
}

std::string Layout::place(int rank, const Indices& axes) const {
  std::string text;
  for (const std::size_t axis : axes) {
    text += (text.empty() ? "" : ", ") + axes_[axis].name + "[" +
            std::to_string(coordinate(rank, axis)) + "]";
  }
  return text + others(rank, axes);
}

std::optional<std::string> crossing_hosts(const Layout& layout,
                                          const std::vector<std::string>& hosts) {
  std::size_t runs = 1;  // of ranks that follow each other on one host
  for (std::size_t rank = 1; rank < hosts.size(); ++rank)
    runs += hosts[rank] == hosts[rank - 1] ? 0 : 1;
  if (runs == std::set<std::string>(hosts.begin(), hosts.end()).size()) return std::nullopt;
  const auto& axes = layout.axes();
  std::size_t last = axes.size() - 1;
  while (last > 0 && axes[last].ranks == 1) --last;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    if (layout.coordinate(rank, last) != 0) continue;
    const std::vector<int> part = layout.part(rank, {last});
    const auto host = [&](int one) { return hosts[static_cast<std::size_t>(one)]; };
    const auto other =
        std::find_if(part.begin(), part.end(), [&](int one) { return host(one) != host(rank); });
    if (other == part.end()) continue;
    return "axis '" + axes[last].name + "', the last one, crosses hosts, and ranks are not " +
           "numbered host by host: rank " + std::to_string(rank) + " is on " + host(rank) +
           " and rank " + std::to_string(*other) + " on " + host(*other) +
           "; number the ranks of each host one after the other, as weft-run does";
  }
  return std::nullopt;
}

}  // namespace weft::mesh
