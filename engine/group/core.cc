#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/engine/group/core.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/transport/registry.h>

namespace weft::group {

namespace {

std::string lower_trimmed(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (std::isspace(static_cast<unsigned char>(letter)) == 0) {
      result += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    }
  }
  return result;
}

const char* device_prefix(c10::DeviceType type) { return type == c10::kCUDA ? "cuda/" : "cpu/"; }

DeviceType to_weft(c10::DeviceType type) { return type == c10::kCUDA ? DeviceType::Cuda : DeviceType::Host; }

}  // namespace

std::map<c10::DeviceType, std::string> parse_backends(const std::string& text) {
  const std::string all = lower_trimmed(text);
  if (all.find_first_of(",:") == std::string::npos) return {{c10::kCPU, all}, {c10::kCUDA, all}};
  std::map<c10::DeviceType, std::string> backends;
  std::size_t begin = 0;
  while (begin <= all.size()) {
    const std::size_t end = std::min(all.find(',', begin), all.size());
    const std::string item = all.substr(begin, end - begin);
    const auto colon = item.find(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == item.size()) {
      throw Error(Blame::Caller, "backend '" + text + "': '" + item + "' is not device:backend, as in cpu:gloo,cuda:nccl");
    }
    const std::string device = item.substr(0, colon);
    if (device != "cpu" && device != "cuda") {
      throw Error(Blame::Caller, "backend '" + text + "': unknown device '" + device + "'; there are cpu and cuda");
    }
    const auto type = device == "cpu" ? c10::kCPU : c10::kCUDA;
    if (!backends.emplace(type, item.substr(colon + 1)).second) {
      throw Error(Blame::Caller, "backend '" + text + "' names " + device + " twice");
    }
    begin = end + 1;
  }
  return backends;
}

Core::Core(CoreOptions given) : options(std::move(given)), bootstrap(std::make_shared<StoreBootstrap>(options.store)) {
  const bool by_default = lower_trimmed(options.backend).empty();
  for (const auto& [type, name] : parse_backends(by_default ? "cpu:gloo,cuda:nccl" : options.backend)) {
    Carrier& carrier = carriers_[type];
    try {
      carrier.transport = transport::open(name);
      if (carrier.transport->reaches(to_weft(type))) {
        carrier.backend = name;
      } else {
        carrier.why_not =
            "backend '" + name + "' does not carry " + c10::DeviceTypeName(type, /*lower_case=*/true) + " tensors";
        carrier.transport.reset();
      }
    } catch (const Error& error) {
      if (!by_default) throw;
      carrier.why_not = error.text();
      log::debug(place() + ": " + carrier.why_not);
    }
  }
}

Job::~Job() {
  if (!membership || loop->inside()) return;
  membership.reset();
  // The goodbye goes out before the loop ends.
  std::atomic<bool> said{false};
  loop->post([&said] { said = true; });
  loop->drive([&said] { return said.load(); });
}

Core::~Core() {
  try {
    leave();
  } catch (const std::exception& error) {
    log::warn("leaving " + place() + ": " + error.what());
  }
  options.job->membership->forget(options.name);
}

void Core::join() {
  listen();
  if (carries(c10::kCPU)) communicator(c10::Device(c10::kCPU));
}

ProcessGroup Core::make(CoreOptions options) {
  auto core = std::make_shared<Core>(std::move(options));
  core->join();
  return core->handle();
}

void Core::listen() {
  const auto& membership = options.job->membership;
  ledger_ = std::make_shared<Ledger>(options.name, options.rank, options.global_ranks,
                                     [weak = std::weak_ptr(membership)](Frame frame) {
                                       if (const auto alive = weak.lock()) alive->send(std::move(frame));
                                     });
  const auto rank_in_group = [ranks = options.global_ranks](int rank) {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  };
  const auto fail_core = [weak = weak_from_this()](const Error& error) {
    if (const auto core = weak.lock()) core->fail(error);
  };
  Membership::Listener listener;
  listener.lost = [ledger = ledger_, rank_in_group, fail_core](int rank, const std::string& how) {
    ledger->on_gone(rank);
    const int member = rank_in_group(rank);
    if (member >= 0) fail_core(Error(Blame::PeerLost, "rank " + std::to_string(member) + " is lost: " + how));
  };
  listener.aborted = [rank_in_group, fail_core](int rank, const std::string& reason) {
    fail_core(Error(Blame::Cancelled, "rank " + std::to_string(rank_in_group(rank)) + " aborted the group: " + reason));
  };
  listener.leaving = [ledger = ledger_, fail_core](const Frame& frame) {
    ledger->on_leaving(frame);
    if (const auto error = ledger->left_behind()) fail_core(*error);
  };
  listener.completed = [ledger = ledger_](int rank, int leaver) { ledger->on_completed(rank, leaver); };
  listener.gone = [ledger = ledger_](int rank) { ledger->on_gone(rank); };
  listener.alone = [ledger = ledger_] { ledger->on_alone(); };
  membership->listen(options.name, std::move(listener));
}

void Core::leave() {
  if (options.size == 1 || !options.job->connected || options.job->loop->inside()) return;
  {
    std::lock_guard lock(error_mutex_);
    if (broken_) return;
  }
  const auto& membership = options.job->membership;
  if (std::uncaught_exceptions() > 0) {
    return membership->send({FrameType::Abort, 0, 0, options.name, "it left by an exception"});
  }
  const Deadline deadline = Deadline::in(options.timeout);
  for (const Op& op : unfinished_) {
    if (!op.done().synchronize(deadline) || op.error()) return;
  }
  const auto known = [&](int rank) { return membership->has(rank); };
  // Most groups end together; who waits for longer is told for whom.
  const auto slow = ledger_->leave(known, Deadline::sooner(deadline, Deadline::in(std::chrono::seconds(5))));
  if (slow.empty()) return;
  std::string ranks;
  for (const int rank : slow) ranks += " " + std::to_string(rank);
  log::warn("leaving " + place() + ": waiting until these ranks have completed what this one took part in:" + ranks);
  if (!ledger_->leave(known, deadline).empty())
    log::error("leaving " + place() + ": they did not within " + describe(options.timeout));
}

const Carrier& Core::carrier(c10::Device device) const {
  const auto found = carriers_.find(device.type());
  if (found == carriers_.end() || found->second.backend.empty()) {
    throw Error(Blame::Caller, "no backend " + place() + " carries tensors on " + device.str() +
                                   (found == carriers_.end() ? "" : ": " + found->second.why_not) +
                                   "; the group was made with backend '" + options.backend + "'");
  }
  return found->second;
}

transport::Communicator& Core::communicator(c10::Device device) {
  static_cast<void>(carrier(device));
  Carrier& carrier = carriers_.at(device.type());
  if (!carrier.communicator) {
    transport::JoinOptions join;
    join.rank = options.rank;
    join.size = options.size;
    join.group_name = options.name;
    join.store = std::make_shared<StoreBootstrap>(
        c10::make_intrusive<c10d::PrefixStore>(device_prefix(device.type()), options.store));
    join.device = tensor::device_of(device);
    join.timeout = options.timeout;
    join.loop = options.job->loop;
    join.interface_address = options.job->local_address;
    carrier.communicator = carrier.transport->join(join);
    // All ranks of the job have come this far: time to watch over each other.
    const bool is_whole_job =
        options.global_ranks.size() == static_cast<std::size_t>(options.size) && !options.job->connected;
    if (is_whole_job) {
      options.job->membership->connect(Deadline::in(options.timeout));
      options.job->connected = true;
    }
  }
  return *carrier.communicator;
}

Work Core::issue(Operation operation, const Call& call) {
  throw_if_broken();
  auto state = std::make_shared<WorkState>();
  state->core = shared_from_this();
  state->device = operation.device;
  std::lock_guard lock(issue_mutex);
  transport::Communicator& carrier = communicator(operation.device);
  const auto number = ledger_->begin_collective();
  state->what = operation.name + " #" + std::to_string(number);
  try {
    if (config().debug == DebugLevel::Detail) compare_across_ranks(operation, number);
  } catch (...) {
    ledger_->complete_collective(number);
    throw;
  }
  const auto is_empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  const bool skip = operation.may_skip && !operation.tensors.empty() &&
                    std::all_of(operation.tensors.begin(), operation.tensors.end(), is_empty);
  if (!skip) call(carrier, tensor::pin(std::move(operation.tensors)), Fence(), state->ops);
  note_completion(number, state->ops);
  return Work(std::move(state));
}

// Device operations are not followed: their backends flush by themselves when they end.
void Core::note_completion(std::uint64_t number, const std::vector<Op>& ops) {
  std::erase_if(unfinished_, [](const Op& op) { return op.done().query(); });
  unfinished_.insert(unfinished_.end(), ops.begin(), ops.end());
  auto left = std::make_shared<std::atomic<std::size_t>>(ops.size());
  if (ops.empty()) ledger_->complete_collective(number);
  for (const Op& op : ops) {
    Task task([left, ledger = ledger_, number] {
      if (--*left == 0) ledger->complete_collective(number);
    });
    if (!op.done().source() || !op.done().source()->on_passed(task)) task();
  }
}

Work Core::issue_message(const std::string& name, const at::Tensor& tensor, int to, int tag, const MessageCall& call) {
  throw_if_broken();
  auto state = std::make_shared<WorkState>();
  state->core = shared_from_this();
  state->device = tensor.device();
  state->what = name;
  std::lock_guard lock(issue_mutex);
  transport::Communicator& carrier = communicator(tensor.device());
  transport::PointToPoint* messages = carrier.point_to_point();
  if (messages == nullptr) {
    throw Error(Blame::Unsupported, name + ": backend '" + std::string(carrier.backend()) + "' has no send and recv");
  }
  if (tag != 0 && !messages->has_tags()) {
    throw Error(Blame::Unsupported,
                name + ": backend '" + std::string(carrier.backend()) + "' has no tags; leave the tag 0");
  }
  const bool is_send = to >= 0;
  if (is_send) ledger_->begin_send(to);
  const Op op = call(*messages, tensor::pin(tensor), Fence());
  state->ops.push_back(op);
  unfinished_.push_back(op);
  Task task([ledger = ledger_, op] { ledger->complete_recv(op.source_rank()); });
  if (!is_send && op.done().source()) op.done().source()->on_passed(task);
  return Work(std::move(state));
}

void Core::compare_across_ranks(const Operation& operation, std::uint64_t number) {
  const std::string base = "detail/" + std::to_string(number) + "/";
  const std::string mine = operation.name + " " + operation.fingerprint;
  bootstrap->set(base + std::to_string(options.rank), to_bytes(mine));
  const Deadline deadline = Deadline::in(options.timeout);
  for (int rank = 0; rank < options.size; ++rank) {
    if (rank == options.rank) continue;
    std::string theirs;
    try {
      theirs = to_text(bootstrap->get(base + std::to_string(rank), deadline));
    } catch (const Error& error) {
      throw Error(error.blame(), "WEFT_DEBUG=detail: rank " + std::to_string(rank) + " did not come to collective #" +
                                     std::to_string(number) + " (" + mine + ") " + place() + ": " + error.text());
    }
    if (theirs != mine) {
      throw Error(Blame::Caller, "WEFT_DEBUG=detail: ranks disagree in collective #" + std::to_string(number) + " " +
                                     place() + ": rank " + std::to_string(options.rank) + " calls " + mine + ", rank " +
                                     std::to_string(rank) + " calls " + theirs);
    }
  }
  // Everybody has read the collective before the last one.
  if (number > 2) bootstrap->erase("detail/" + std::to_string(number - 2) + "/" + std::to_string(options.rank));
}

void Core::fail(const Error& why) {
  {
    std::lock_guard lock(error_mutex_);
    if (broken_) return;
    broken_ = why.within("group '" + options.name + "'");
  }
  broken_changed_.notify_all();
  for (auto& [type, carrier] : carriers_) {
    if (carrier.communicator) carrier.communicator->abort(why);
  }
}

Error Core::explain(const Error& error) {
  if (error.blame() != Blame::PeerLost) return error;
  std::unique_lock lock(error_mutex_);
  if (options.job->connected && !options.job->loop->inside()) {
    broken_changed_.wait_for(lock, std::chrono::seconds(1), [this] { return broken_.has_value(); });
  }
  if (broken_ && broken_->text().ends_with(error.text())) return *broken_;
  if (broken_) return Error(broken_->blame(), broken_->text() + " (" + error.text() + ")", error.place());
  if (!broken_ && options.size == 2) {
    return Error(error.blame(), "rank " + std::to_string(1 - options.rank) + " is lost: " + error.text(), error.place());
  }
  return error;
}

void Core::throw_if_broken() {
  std::lock_guard lock(error_mutex_);
  if (unseen_) {
    const Error error = *unseen_;
    unseen_.reset();
    throw error.within("an earlier operation failed");
  }
  if (broken_) throw *broken_;
}

void Core::note_unseen(const Error& error) {
  std::lock_guard lock(error_mutex_);
  if (!unseen_) unseen_ = error;
}

std::string Core::place() const {
  return "on group '" + options.name + "' (rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
         ")";
}

void Core::check_rank(int rank, const char* what) const {
  if (rank < 0 || rank >= options.size) {
    throw Error(Blame::Caller, std::string(what) + " " + std::to_string(rank) +
                                   " is not a rank of the group; they go from 0 to " + std::to_string(options.size - 1) +
                                   " " + place());
  }
}

c10::Device Core::barrier_device() const {
  return carries(options.device.type()) ? options.device : c10::Device(c10::kCPU);
}

bool Core::carries(c10::DeviceType type) const {
  const auto found = carriers_.find(type);
  return found != carriers_.end() && !found->second.backend.empty();
}

int Core::next_number(const std::string& kind) {
  std::lock_guard lock(numbers_mutex_);
  return ++numbers_[kind];
}

void Core::abort(const std::string& reason) {
  options.job->membership->send({FrameType::Abort, 0, 0, options.name, reason});
  fail(Error(Blame::Cancelled, "rank " + std::to_string(options.rank) + " aborted the group: " + reason));
}

void Core::monitored_barrier(std::chrono::milliseconds timeout) {
  throw_if_broken();
  const std::string base = "monitored/" + std::to_string(next_number("monitored barrier")) + "/";
  const Deadline deadline = Deadline::in(timeout);
  if (options.rank != 0) {
    bootstrap->set(base + std::to_string(options.rank), {});
    std::string verdict;
    try {
      // Rank 0 says at its own deadline who is missing; it may have come later than this rank.
      verdict = to_text(bootstrap->get(base + "verdict", Deadline::in(timeout + std::chrono::seconds(1))));
    } catch (const Error& error) {
      throw Error(error.blame(), "rank " + std::to_string(options.rank) + " came to the monitored barrier " + place() +
                                     ", but rank 0 did not within " + describe(timeout) + ": " + error.text());
    }
    if (verdict != "passed") {
      throw Error(Blame::Timeout, "rank " + std::to_string(options.rank) + " came to the monitored barrier " + place() +
                                      ", but it failed: " + verdict);
    }
    return;
  }
  std::string missing;
  int absent = 0;
  for (int rank = 1; rank < options.size; ++rank) {
    const std::string key = base + std::to_string(rank);
    if (!deadline.passed()) {
      try {
        bootstrap->get(key, deadline);
        continue;
      } catch (const Error& error) {
        if (error.blame() != Blame::Timeout) throw;
      }
    } else if (bootstrap->exists(key)) {
      continue;
    }
    ++absent;
    missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (absent == 0) return bootstrap->set(base + "verdict", to_bytes("passed"));
  const std::string verdict = (absent == 1 ? "rank " : "ranks ") + missing + " did not come within " + describe(timeout);
  bootstrap->set(base + "verdict", to_bytes(verdict));
  throw Error(Blame::Timeout, "monitored barrier " + place() + ": " + verdict);
}

ProcessGroup Core::new_group(const std::vector<int>& ranks, const ProcessGroupOptions& wanted) {
  throw_if_broken();
  const std::string number = std::to_string(next_number("group"));
  std::vector<bool> named(static_cast<std::size_t>(options.size));
  if (ranks.empty()) throw Error(Blame::Caller, "new_group: no ranks are given");
  for (const int rank : ranks) {
    check_rank(rank, "new_group:");
    if (named[static_cast<std::size_t>(rank)])
      throw Error(Blame::Caller, "new_group: rank " + std::to_string(rank) + " is named twice");
    named[static_cast<std::size_t>(rank)] = true;
  }
  const auto place = std::find(ranks.begin(), ranks.end(), options.rank);
  if (place == ranks.end()) return {};
  CoreOptions made = options;
  made.rank = static_cast<int>(place - ranks.begin());
  made.size = static_cast<int>(ranks.size());
  made.name = options.name + "/" + (wanted.group_name.empty() ? number : wanted.group_name);
  made.global_ranks.clear();
  for (const int rank : ranks) made.global_ranks.push_back(options.global_ranks[static_cast<std::size_t>(rank)]);
  made.store = c10::make_intrusive<c10d::PrefixStore>("group" + number + "/", options.store);
  if (!wanted.backend.empty()) made.backend = wanted.backend;
  if (wanted.timeout != ProcessGroupOptions().timeout) made.timeout = wanted.timeout;
  return make(std::move(made));
}

ProcessGroup Core::split(int color, int key) {
  throw_if_broken();
  const std::string number = std::to_string(next_number("split"));
  const std::string base = "split/" + number + "/";
  bootstrap->set(base + std::to_string(options.rank), to_bytes(std::to_string(color) + " " + std::to_string(key)));
  const Deadline deadline = Deadline::in(options.timeout);
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int rank = 0; rank < options.size; ++rank) {
    const std::string text = to_text(bootstrap->get(base + std::to_string(rank), deadline));
    const int their_color = std::stoi(text);
    if (their_color == color) members.emplace_back(std::stoi(text.substr(text.find(' ') + 1)), rank);
  }
  if (color < 0) return {};
  std::sort(members.begin(), members.end());
  CoreOptions made = options;
  made.size = static_cast<int>(members.size());
  made.name = options.name + "/split" + number + "." + std::to_string(color);
  made.global_ranks.clear();
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i].second == options.rank) made.rank = static_cast<int>(i);
    made.global_ranks.push_back(options.global_ranks[static_cast<std::size_t>(members[i].second)]);
  }
  made.store = c10::make_intrusive<c10d::PrefixStore>("split" + number + "/" + std::to_string(color) + "/", options.store);
  return make(std::move(made));
}

}  // namespace weft::group
