// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <sstream>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/config.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/fixed_job.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/group/secret.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/engine/rendezvous/launcher_variables.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/engine/rendezvous/url.h>
#include <weft/engine/rpc/init.h>
#include <weft/engine/rref/references.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/prefix.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/transport/challenge.h>
#include <weft/transport/signed_bootstrap.h>
#include <weft/transport/tls/credentials.h>

namespace weft::rpc {

namespace {

// Whether the number of workers is given nowhere: then they come and go.
bool is_open(const Options& options, const group::Environment& environment) {
  if (options.world_size) return false;
  if (options.store) return true;
  const auto url = group::Url::parse(options.init_method);
  if (url.number("world_size")) return false;
  return group::first_set(environment, group::kWorldSizeVariables) == nullptr;
}

group::RendezvousOptions meeting(const Options& options, bool open,
                                 const group::Environment& environment) {
  group::RendezvousOptions meeting;
  meeting.init_method = options.init_method;
  meeting.rank = options.rank;
  meeting.world_size = options.world_size;
  meeting.store = options.store;
  meeting.wait_reports = options.wait_reports;
  meeting.group_name = "rpc" + (options.group_name.empty() ? "" : "/" + options.group_name);
  if (!open) return meeting;
  if (!meeting.rank && !options.store)
    meeting.rank = group::Url::parse(options.init_method).number("rank");
  if (const char* rank = environment("RANK"); !meeting.rank && rank != nullptr)
    meeting.rank = group::to_number("RANK", rank);
  meeting.world_size = meeting.rank.value_or(0) + 1;
  return meeting;
}

// The live agents of this process, by the way in which they meet others. A second agent of the same
// rank would wait for a peer that does not come, or would take the first one's place.
class Presence {
 public:
  Presence(std::string name, std::string key) : key_(std::move(key)) {
    MutexLock lock(all().mutex);
    if (const auto [known, fresh] = all().names.emplace(key_, name); !fresh) {
      throw Error(
          Blame::Caller,
          "worker '" + name + "': an agent of this rank, '" + known->second +
              "', is already initialized in this process; let it leave() or shutdown() before, or "
              "give each an own rank, or rpc::Options::group_name");
    }
  }
  ~Presence() {
    MutexLock lock(all().mutex);
    all().names.erase(key_);
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  struct All {
    ForkMutex mutex{ForkOrder::Engine};
    std::map<std::string, std::string> names WEFT_GUARDED_BY(mutex);
  };
  static All& all() {
    static auto* all = new All;  // never destroyed: agents may outlive static objects
    return *all;
  }
  const std::string key_;
};

// A higher rank does not fit into the ids that a worker assigns: they would be another worker's.
void check_rank(int rank) {
  if (rank <= call::kHighestRank) return;
  throw Error(Blame::Caller, "rank " + std::to_string(rank) +
                                 " is too high for a worker; ranks go from 0 to " +
                                 std::to_string(call::kHighestRank) +
                                 ", also where workers come and go: take one that is free");
}

void check_secret(const std::string& secret) {
  if (secret.empty() || secret.size() >= transport::kShortestSecret) return;
  throw Error(
      Blame::Caller,
      "rpc::Options::secret has " + std::to_string(secret.size()) +
          " characters, which can be guessed; give all workers the same random text of at least " +
          std::to_string(transport::kShortestSecret) +
          ", as `openssl rand -hex 16` prints it, or none");
}

// Null if the rank is not known before this worker meets the others.
std::shared_ptr<const Presence> presence_of(const std::string& name,
                                            const group::RendezvousOptions& meeting, bool open) {
  if (open && !meeting.rank) return nullptr;  // it takes a free one
  const auto url = group::Url::parse(meeting.init_method);
  const bool by_environment = !meeting.store && url.scheme == "env";
  if (!meeting.rank && !by_environment && !url.number("rank")) return nullptr;
  std::ostringstream key;
  if (meeting.store) {
    key << "store " << meeting.store.get();
  } else {
    key << meeting.init_method;
  }
  key << '\n' << meeting.group_name << '\n' << meeting.rank.value_or(-1) << '\n' << forks_before();
  return std::make_shared<const Presence>(name, key.str());
}

// The workers' keys in a part of the job's store. Values of processes without the secret are
// refused.
std::shared_ptr<transport::SignedBootstrap> signed_keys(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& secret) {
  return std::make_shared<transport::SignedBootstrap>(
      std::make_shared<group::StoreBootstrap>(group::connection_of(store)), secret,
      group::prefix_of(store), transport::SignedBootstrap::Users::Workers);
}

// An agent without transports between machines cannot be reached from another one.
void say_open_agent(const WorkerInfo& self, const std::string& address,
                    const std::vector<std::string>& transports) {
  const auto is_local = [](const std::string& one) { return one == "inproc" || one == "shm"; };
  if (address.empty() || (!transports.empty() && std::ranges::all_of(transports, is_local))) return;
  group::say_open("worker '" + self.name + "'", address, "join its job and call its functions",
                  "rpc::Options::secret", self.rank <= 0);
}

}  // namespace

Agent init(const std::string& name, Options options) {
  return init(name, std::move(options), std::make_shared<tensor::CudaDevices>());
}

Agent init(const std::string& name, Options options, std::shared_ptr<tensor::CudaDevices> devices) {
  check_environment();                               // reports a wrong variable
  static_cast<void>(transport::tls::credentials());  // and a wrong certificate
  expose<&run_operator>();  // callable by name even if the program itself calls none
  expose<&run_operator_for_list>();
  call::check_name(name);
  const std::string timeline = instruments::timeline_file(options.timeline);
  if (options.worker_threads < 1) {
    throw Error(Blame::Caller, "rpc::Options::worker_threads is " +
                                   std::to_string(options.worker_threads) +
                                   "; it must be at least 1");
  }
  if (options.calls_in_flight < 1) {
    throw Error(Blame::Caller, "rpc::Options::calls_in_flight is " +
                                   std::to_string(options.calls_in_flight) +
                                   "; it must be at least 1");
  }
  if (options.bytes_in_flight < 0) {
    throw Error(Blame::Caller, "rpc::Options::bytes_in_flight is " +
                                   std::to_string(options.bytes_in_flight) +
                                   "; it must be at least 1, or 0 for no limit");
  }
  options.timeout = call::usable_limit(options.timeout, "rpc::Options::timeout");
  for (const auto& [kind, delay] : options.faults.delay) {
    if (delay.count() < 0) throw Error(Blame::Caller, "rpc::Faults::delay holds a negative time");
  }
  check_secret(options.secret);
  call::check_device_maps(name, options.device_maps, options.devices);
  tensor::prepare_for_cuda();
  const auto environment = group::process_environment();
  const bool open = is_open(options, environment);
  const auto limit = options.timeout.count() == 0 ? group::kLongestTimeout : options.timeout;
  const Deadline deadline = Deadline::in(limit);
  const auto wanted = meeting(options, open, environment);
  if (wanted.rank) check_rank(*wanted.rank);  // before anybody waits for it
  const auto presence = presence_of(name, wanted, open);
  const auto place = group::rendezvous(wanted, environment, deadline, open);
  check_rank(place.rank);
  if (place.before) {
    call::check_rank_is_free(*signed_keys(place.before, options.secret), {name, place.rank});
  }

  call::AgentCore::Parts parts;
  parts.self = {name, place.rank};
  if (!open) parts.world_size = place.world_size;
  parts.kept = {place.until_all_came,
                std::make_shared<c10::intrusive_ptr<c10d::Store>>(place.store)};
  parts.store = signed_keys(place.store, options.secret);
  if (open) parts.announcements = signed_keys(place.store, options.secret);
  parts.options = std::move(options);
  parts.devices = std::move(devices);
  // Peers may come only from this machine, unless the user names an interface.
  const auto& interfaces = config().socket_interfaces;
  const std::string address =
      interfaces.empty() ? "" : group::address_of_interface(interfaces.front());
  if (parts.options.secret.empty()) say_open_agent(parts.self, address, parts.options.transports);
  const auto store = parts.store;
  const auto kept = parts.kept;
  parts.make_references = [](call::AgentCore& core) {
    return std::make_unique<rref::References>(core);
  };
  parts.make_contexts = [](call::AgentCore& core) {
    return std::make_unique<autograd::Contexts>(core);
  };
  auto core = call::AgentCore::make(parts, address, deadline);
  const instruments::InstrumentedRank participant{core->self().rank, open ? 0 : place.world_size,
                                                  timeline};
  if (place.number) place.number->keep();
  using Kept = std::pair<std::shared_ptr<const Presence>, std::shared_ptr<const void>>;
  core->lifetime().keep_until_left(
      std::make_shared<Kept>(presence, instruments::start(participant, store, kept, deadline)));
  log::info("worker " + describe(core->self()) + " has joined");
  return Agent(std::move(core), /*leaves_when_dropped=*/true);
}

}  // namespace weft::rpc
