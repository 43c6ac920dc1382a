// SPDX-License-Identifier: Apache-2.0
#include <map>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/engine/rendezvous/launcher_variables.h>
#include <weft/engine/rendezvous/lives.h>
#include <weft/engine/rendezvous/multicast.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/engine/rendezvous/scheme.h>
#include <weft/engine/rendezvous/url.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// Takes rank and world size from the options, else from the URL, else from the environment.
Wanted wanted_of(const RendezvousOptions& options, const Url& url, const Environment& environment) {
  Wanted wanted{options.rank, options.world_size, {}};
  const auto fill = [&](std::optional<int>& number, const char* name,
                        std::initializer_list<const char*> variables) {
    std::string from = std::string("the option ") + name;
    if (!number && (number = url.number(name))) from = std::string("?") + name + "= of the URL";
    const char* const variable = number ? nullptr : first_set(environment, variables);
    if (variable != nullptr) {
      number = to_number(variable, environment(variable));
      from = variable;
    }
    if (number) wanted.said_by += (wanted.said_by.empty() ? "" : " and ") + from;
  };
  fill(wanted.rank, "rank", kRankVariables);
  fill(wanted.world_size, "world_size", kWorldSizeVariables);
  return wanted;
}

// Number of meetings that this process has had under each name. All ranks of a job count alike, if
// each meeting succeeds or fails for all of them.
constinit ForkMutex meetings_mutex(ForkOrder::Engine);
auto* const meetings WEFT_POINTEE_GUARDED_BY(meetings_mutex) = new std::map<std::string, int>();

}  // namespace

Numbered::Numbered(std::string name) : name_(std::move(name)) {
  MutexLock lock(meetings_mutex);
  value_ = ++(*meetings)[name_];
}

Numbered::~Numbered() {
  MutexLock lock(meetings_mutex);
  if (!is_kept_ && (*meetings)[name_] == value_) --(*meetings)[name_];
}

Rendezvous rendezvous(const RendezvousOptions& options, const Environment& environment,
                      Deadline deadline, bool open) {
  Rendezvous result;
  const Url url = options.store ? Url() : Url::parse(options.init_method);
  const Wanted wanted = options.store ? Wanted{options.rank, options.world_size, {}}
                                      : wanted_of(options, url, environment);
  Wanted shown = wanted;
  if (open) {  // the world size is not the program's
    shown.world_size.reset();
    shown.said_by.clear();
  }
  Seeker seeker(shown, environment, options.wait_reports);
  if (options.store) {
    result.rank = open && !wanted.rank ? kAnyRank : require_rank(wanted, "a given store", "");
    result.world_size = require_world_size(wanted, "a given store", "");
    if (result.rank != kAnyRank) check_range(result.rank, result.world_size);
    result.store = options.store;
  }
  const bool shared = !options.group_name.empty();
  if (url.scheme == "file") {
    result = join_file(url, wanted, options.group_name, deadline, open);
  } else if (url.scheme == "env") {
    result = join_env(wanted, options.group_name, environment, deadline, open, seeker);
  } else if (url.scheme == "tcp") {
    if (url.host.empty() || !url.port) {
      throw Error(Blame::Caller,
                  "'" + options.init_method + "' needs a host and a port: tcp://10.0.0.1:29500");
    }
    if (open && !wanted.rank && is_multicast(url.host)) {
      throw Error(Blame::Caller, "'" + options.init_method +
                                     "' is a multicast address, where a worker that comes and goes "
                                     "needs a rank: set it, or "
                                     "give the address of rank 0");
    }
    result = is_multicast(url.host)
                 ? join_multicast(url, wanted, options.group_name, deadline, seeker)
                 : join_tcp({url.host, *url.port}, wanted, options.group_name, environment,
                            deadline, open, seeker);
  }
  if (url.scheme != "file") {
    // A given store stays as it is. Others get the prefix of Python's init_process_group, so that
    // Python and C++ ranks meet.
    if (!options.store || shared) result.store = under_name(result.store, options.group_name);
    try {
      if (!open) {
        auto [store, before] = next_life(result.store, std::to_string(result.rank));
        result.store = std::move(store);
        result.before = std::move(before);
      }
    } catch (const std::exception& error) {
      throw Error(
          Blame::PeerLost,
          "rank " + std::to_string(result.rank) +
              " was not counted by the job's store; the process that hosts it may have ended: " +
              tensor::text_of(error));
    }
  }
  result.local_rank = local_rank(environment).value_or(0);
  result.said_by = shown.said_by;
  return result;
}

}  // namespace weft::group
