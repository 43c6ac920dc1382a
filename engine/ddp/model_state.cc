// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string_view>

#include <ATen/ops/empty.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/codec/digest.h>
#include <weft/engine/ddp/flat.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/group/access.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/objects.h>

namespace weft::parallel {

namespace {

std::string line_of(const NamedTensor& item, const std::vector<c10::Device>& gpus) {
  std::ostringstream text;
  text << item.name << " " << c10::toString(item.tensor.scalar_type()) << " "
       << item.tensor.sizes();
  if (item.tensor.layout() == at::kStrided) {
    text << " strides " << item.tensor.strides();
  } else {
    text << " " << item.tensor.layout();
  }
  const auto place = std::find(gpus.begin(), gpus.end(), item.tensor.device()) - gpus.begin();
  if (item.tensor.is_cuda())
    text << (place == 0 ? " on the rank's GPU"
                        : " on GPU " + std::to_string(place + 1) + " of the rank");
  return text.str();
}

std::string text_of(const ProcessGroup& group, const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& item : named) tensors.push_back(item.tensor);
  const std::vector<c10::Device> gpus = gpus_of(group, tensors);
  std::string text;
  for (const NamedTensor& item : named) text += line_of(item, gpus) + "\n";
  return text;
}

// The first line in which the two texts differ; "" if they are equal.
std::string difference(const std::string& mine, const std::string& theirs) {
  if (mine == theirs) return "";
  std::istringstream left(mine);
  std::istringstream right(theirs);
  for (;;) {
    std::string a;
    std::string b;
    const bool has_a = static_cast<bool>(std::getline(left, a));
    const bool has_b = static_cast<bool>(std::getline(right, b));
    if (a == b && has_a && has_b) continue;
    return "it has " + (has_a ? a : "no more parameters") + " where rank 0 has " +
           (has_b ? b : "no more parameters");
  }
}

constexpr const char* kNotAlike =
    ", and not alike on all ranks; freeze and thaw parameters on all of them, between the same "
    "forwards";

std::string change_key(int rank) { return "ddp/changed/" + std::to_string(rank); }

// Collective: each rank compares its text with rank 0's, and all throw the same error.
[[noreturn]] void throw_difference(ProcessGroup& group, const std::string& mine) {
  const auto found = all_gather_object(difference(mine, broadcast_object(mine, 0, group)), group);
  std::string differing;
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    if (!found[rank].empty())
      differing +=
          (differing.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + found[rank];
  }
  group::throw_together(group,
                        Error(Blame::Caller, "the model, or an option, differs between ranks " +
                                                 group::place_of(group) + ": " + differing));
}

}  // namespace

// Compares digests, because texts are long and nearly always equal.
bool is_same_on_all(ProcessGroup& group, const std::string& text) {
  codec::Digest digest;
  digest.add(text.data(), text.size());
  const std::string own = digest.text();
  const auto length = static_cast<std::int64_t>(own.size());
  const c10::Device device = group::host_values_device(group);
  const at::Tensor mine = at::empty({length}, at::TensorOptions(at::kByte));
  std::copy(own.begin(), own.end(), static_cast<char*>(mine.mutable_data_ptr()));
  const at::Tensor all = at::empty({group.size() * length}, mine.options().device(device));
  group.all_gather_into(all, mine.to(device)).wait();
  const at::Tensor here = all.to(at::kCPU);
  const auto* const digests = static_cast<const char*>(here.const_data_ptr());
  for (int rank = 0; rank < group.size(); ++rank) {
    if (std::string_view(digests + rank * length, own.size()) != own) return false;
  }
  return true;
}

void check_same_model(ProcessGroup& group, const std::vector<NamedTensor>& tensors,
                      const std::string& options) {
  if (group.size() == 1) return;
  const std::string mine = options + text_of(group, tensors);
  if (!is_same_on_all(group, mine)) throw_difference(group, mine);
  // All ranks have equal models here, so either all of them throw or none.
  for (const NamedTensor& item : tensors)
    require_flat(item.tensor, "'" + item.name + "' of the model");
}

void on_all_ranks(const ProcessGroup& group, const char* name, const char* place,
                  const std::function<void()>& call) {
  const group::CalledBy by(name);
  try {
    call();
  } catch (const Error& error) {
    const bool is_late = error.blame() == Blame::Timeout && !error.ranks().empty();
    const auto left = [&](int rank) { return group::has_left(group, rank); };
    const bool has_left =
        error.blame() == Blame::PeerLost && std::ranges::any_of(error.ranks(), left);
    if (!is_late && !has_left) throw;
    const std::string hint = "; all ranks of the group must come to " + std::string(place);
    if (has_left) throw error.with_text(error.text() + hint);
    throw error.with_text(std::string(name) + ": " + ranks_text(error.ranks()) +
                          " did not come to " + place + " within " +
                          describe(group::timeout_of(group)) + ": " + error.text() + hint);
  }
}

void announce_change(const ProcessGroup& group, const std::string& what) {
  if (group.size() > 1) group::store_of(group).set(change_key(group.rank()), group::to_bytes(what));
}

void withdraw_change(const ProcessGroup& group) {
  if (group.size() > 1) group::store_of(group).erase(change_key(group.rank()));
}

Error explained_by_changes(const ProcessGroup& group, const Error& error) {
  const bool is_explained = error.text().find(kNotAlike) != std::string::npos;
  if (error.blame() != Blame::Caller || group.size() == 1 || is_explained) return error;
  // The group is broken, so this uses a store that the failure does not interrupt.
  group::StoreBootstrap store = group::uninterrupted_store_of(group);
  std::string changes;
  try {
    const Deadline soon = Deadline::in(std::chrono::seconds(1));
    for (int rank = 0; rank < group.size(); ++rank) {
      if (!store.exists(change_key(rank))) continue;
      changes +=
          (changes.empty() ? "" : ", for ") + group::to_text(store.get(change_key(rank), soon));
    }
    if (changes.empty()) return error;
    store.set(change_key(group.rank()) + "/read", {});
    for (int rank = 1; group.rank() == 0 && rank < group.size(); ++rank)
      store.get(change_key(rank) + "/read", soon);
  } catch (const Error& second) {
    log::debug(second.text());
  }
  if (changes.empty()) return error;
  return error.with_text("requires_grad was changed for " + changes + kNotAlike + ": " +
                         error.text());
}

void broadcast_values(DeviceGroups& groups, const std::vector<at::Tensor>& tensors, int root,
                      std::uint32_t model) {
  constexpr std::size_t kPiece = 250u << 20;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_meta()) continue;
    throw Error(Blame::Caller,
                "the model was built under weft::OnMeta and has no values yet; call "
                "weft::materialize(model, seed) first");
  }
  if (groups.own().size() == 1) return;
  for (const auto& piece : pieces_of(tensors, kPiece)) {
    const at::Tensor flat = flatten(piece);
    group::broadcast(groups.of(flat.device()), flat, root, {}, {.model = model}).wait();
    if (groups.own().rank() != root) unflatten(flat, piece);
  }
}

}  // namespace weft::parallel
