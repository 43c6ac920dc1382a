#include <algorithm>
#include <sstream>

#include <weft/base/log.h>
#include <weft/engine/group/core.h>
#include <weft/engine/parallel/flat.h>
#include <weft/engine/parallel/model_state.h>

namespace weft::parallel {

namespace {

std::string line_of(const NamedTensor& item, const std::vector<c10::Device>& gpus) {
  std::ostringstream text;
  text << item.name << " " << c10::toString(item.tensor.scalar_type()) << " " << item.tensor.sizes();
  if (item.tensor.layout() == at::kStrided) {
    text << " strides " << item.tensor.strides();
  } else {
    text << " " << item.tensor.layout();
  }
  const auto place = std::find(gpus.begin(), gpus.end(), item.tensor.device()) - gpus.begin();
  if (item.tensor.is_cuda())
    text << (place == 0 ? " on the rank's GPU" : " on GPU " + std::to_string(place + 1) + " of the rank");
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

// The first line in which two texts differ; "" if they are equal.
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
    return "it has " + (has_a ? a : "no more parameters") + " where rank 0 has " + (has_b ? b : "no more parameters");
  }
}

}  // namespace

void check_same_model(ProcessGroup& group, const std::vector<NamedTensor>& tensors, const std::string& options) {
  if (group.size() == 1) return;
  auto& core = group::Core::of(group);
  const int number = core.next_number("model");
  const auto base_of = [](int check) { return "model" + std::to_string(check) + "/"; };
  const std::string base = base_of(number);
  // All ranks came to the check before this one, which this rank has left: nobody reads the keys of that before it.
  if (number > 2) {
    core.bootstrap->erase(base_of(number - 2) + std::to_string(group.rank()));
    if (group.rank() == 0) core.bootstrap->erase(base_of(number - 2) + "all");
  }
  const Deadline deadline = Deadline::in(core.options.timeout);
  const std::string mine = options + text_of(group, tensors);
  // A rank that found a difference says so before anybody goes on. Rank 0 hears them all, for all.
  std::string differing;
  if (group.rank() == 0) {
    core.bootstrap->set(base + "0", group::to_bytes(mine));
    for (int rank = 1; rank < group.size(); ++rank) {
      const std::string theirs = group::to_text(core.bootstrap->get(base + std::to_string(rank), deadline));
      if (!theirs.empty()) differing += (differing.empty() ? "" : "; ") + ("rank " + std::to_string(rank) + ": " + theirs);
    }
    core.bootstrap->set(base + "all", group::to_bytes(differing));
  } else {
    const std::string verdict = difference(mine, group::to_text(core.bootstrap->get(base + "0", deadline)));
    core.bootstrap->set(base + std::to_string(group.rank()), group::to_bytes(verdict));
    differing = group::to_text(core.bootstrap->get(base + "all", deadline));
  }
  if (!differing.empty()) {
    // Who throws may end, and the store with it: the others are to read the same first.
    try {
      const Deadline soon = Deadline::sooner(deadline, Deadline::in(std::chrono::seconds(1)));
      core.bootstrap->set(base + "told/" + std::to_string(group.rank()), {});
      for (int rank = 0; rank < group.size(); ++rank) core.bootstrap->get(base + "told/" + std::to_string(rank), soon);
    } catch (const Error& error) {
      log::debug(error.text());
    }
    throw Error(Blame::Caller, "the model, or an option, differs between ranks " + core.place() + ": " + differing);
  }
  // Of equal models all ranks say the same.
  for (const NamedTensor& item : tensors) require_flat(item.tensor, "'" + item.name + "' of the model");
}

void broadcast_values(DeviceGroups& groups, const std::vector<at::Tensor>& tensors, int root, std::uint32_t model) {
  constexpr std::size_t kPiece = 250u << 20;
  if (groups.own().size() == 1) return;
  for (const auto& piece : pieces_of(tensors, kPiece)) {
    const at::Tensor flat = flatten(piece);
    group::Core::of(groups.of(flat.device())).broadcast(flat, root, {}, {.model = model}).wait();
    if (groups.own().rank() != root) unflatten(flat, piece);
  }
}

}  // namespace weft::parallel
