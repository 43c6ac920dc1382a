// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/engine/group/arguments.h>
#include <weft/engine/group/backends.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/group/secret.h>
#include <weft/engine/instruments/instruments.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/engine/store/address.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/transport/registry.h>
#include <weft/transport/tls/credentials.h>

namespace weft {

namespace {

c10::Device default_device(int local_rank) {
  const int count = tensor::cuda_device_count();
  if (count == 0) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank % count));
}

// The reason why a named backend cannot be used here.
std::optional<Error> unusable(const std::string& backends) {
  if (group::is_default_backend(backends)) return std::nullopt;
  for (const auto& [type, name] : group::parse_backends(backends)) {
    try {
      static_cast<void>(transport::open(name));
    } catch (const Error& error) {
      return error;
    }
  }
  return std::nullopt;
}

// Throws Caller for a secret that can be guessed and for a limit that no group can keep.
void check_connections(const ProcessGroupOptions& options) {
  constexpr std::size_t kShortestSecret = 16;
  constexpr int kFewest = 2;
  if (!options.secret.empty() && options.secret.size() < kShortestSecret) {
    throw Error(Blame::Caller,
                "ProcessGroupOptions::secret has " + std::to_string(options.secret.size()) +
                    " bytes, and a secret of fewer than 16 can be guessed; make one at random "
                    "(openssl rand -hex 16)");
  }
  if (options.max_connections < kFewest) {
    throw Error(Blame::Caller, "ProcessGroupOptions::max_connections is " +
                                   std::to_string(options.max_connections) +
                                   "; a rank needs at least 2");
  }
}

// An unknown backend is a mistake of the program, which all ranks make: this rank throws at once. A
// rank that cannot use its backend meets the others to tell them, but does not wait for them:
// mostly they cannot use it either, and the store has ended with rank 0.
group::Rendezvous meet(const ProcessGroupOptions& options, Deadline deadline) {
  constexpr auto kSoon = std::chrono::seconds(2);
  const auto why_not = unusable(options.backend);
  if (why_not && why_not->blame() == Blame::Caller) throw Error(*why_not);
  if (why_not) deadline = Deadline::sooner(deadline, Deadline::in(kSoon));
  try {
    return group::rendezvous({.init_method = options.init_method,
                              .rank = options.rank,
                              .world_size = options.world_size,
                              .store = options.store,
                              .group_name = options.group_name,
                              .wait_reports = options.wait_reports},
                             group::process_environment(), deadline);
  } catch (const Error&) {
    if (why_not) throw Error(*why_not);
    throw;
  }
}

}  // namespace

ProcessGroup init_process_group(ProcessGroupOptions options) {
  return group::init(std::move(options), std::make_shared<tensor::CudaDevices>());
}

namespace {

std::shared_ptr<group::Job> start_job(const group::CoreOptions& made,
                                      const std::string& local_address,
                                      std::shared_ptr<tensor::CudaDevices> devices) {
  auto job = std::make_shared<group::Job>();
  job->devices = std::move(devices);
  job->loop = std::make_shared<EventLoop>("weft " + made.name);
  job->local_address = config().socket_interfaces.empty()
                           ? local_address
                           : group::address_of_interface(config().socket_interfaces.front());
  job->membership = group::Membership::make(made.rank, made.size, job->local_address,
                                            std::make_shared<group::StoreBootstrap>(made.own_store),
                                            job->loop, made.secret);
  job->stores = group::MemberStores::make(made.rank, job->membership);
  return job;
}

}  // namespace

ProcessGroup group::init(ProcessGroupOptions options,
                         std::shared_ptr<tensor::CudaDevices> devices) {
  check_environment();  // reports a wrong variable before any rank waits
  static_cast<void>(transport::tls::credentials());  // and a wrong certificate
  static_cast<void>(group::parse_backends(options.backend));
  options.backend = group::backends_of(options.backend);
  if (group::parse_backends(options.backend).contains(c10::kCUDA)) tensor::prepare_for_cuda();
  const std::string timeline = instruments::timeline_file(options.timeline);
  if (options.timeout <= std::chrono::milliseconds(0)) {
    throw Error(Blame::Caller, "the timeout of a process group is " + describe(options.timeout) +
                                   "; it must be positive");
  }
  check_connections(options);
  if (options.device) group::check_device(*options.device, devices->count());
  options.timeout = std::min(options.timeout, group::kLongestTimeout);
  const Deadline deadline = Deadline::in(options.timeout);
  const auto place = meet(options, deadline);

  group::CoreOptions made;
  made.rank = place.rank;
  made.size = place.world_size;
  made.name = options.group_name.empty() ? "default" : options.group_name;
  made.device = options.device.value_or(default_device(place.local_rank));
  if (made.device.is_cuda() && !made.device.has_index()) {
    const c10::Device own = default_device(place.local_rank);
    made.device.set_index(own.is_cuda() ? own.index() : 0);
  }
  made.timeout = options.timeout;
  made.secret = options.secret;
  made.max_connections = static_cast<std::size_t>(options.max_connections);
  for (int rank = 0; rank < made.size; ++rank) made.global_ranks.push_back(rank);
  // "0/" is the name of Python's first group.
  made.store = c10::make_intrusive<c10d::PrefixStore>("0/", place.store);
  if (!options.store)
    place.store->setTimeout(options.timeout);  // until now it was the time left for joining
  // With a connection of its own the group is not held up by a user who blocks on the store.
  made.own_store = made.store;
  made.backend = options.backend;
  try {
    made.own_store = group::connection_of(made.store);
    made.job = start_job(made, place.local_address, std::move(devices));
    made.job->hosts_store = place.hosts;
  } catch (const Error& error) {
    group::tell_failure(made, error);  // the others wait for this rank
    throw;
  }
  made.job->waits =
      group::Waits::make(made.rank, made.job->membership, made.job->loop, options.wait_reports);
  made.said_by = place.said_by;
  log::set_thread_label("rank " + std::to_string(made.rank));
  const auto membership = made.job->membership;
  auto joined = group::Core::make(made);
  // The group itself may not have waited for them.
  if (place.until_all_came) membership->wait_for_all(deadline);
  if (place.number) place.number->keep();
  made.job->looked_into = instruments::start(
      {made.rank, made.size, timeline},
      std::make_shared<transport::SignedBootstrap>(group::signed_store_of(made)),
      {std::make_shared<c10::intrusive_ptr<c10d::Store>>(place.store)}, deadline);
  log::info("joined group '" + group::Core::of(joined).options.name + "' as rank " +
            std::to_string(place.rank) + " of " + std::to_string(place.world_size));
  return joined;
}

}  // namespace weft
