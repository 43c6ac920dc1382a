// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/engine/rendezvous/job_store.h>
#include <weft/engine/rendezvous/multicast.h>
#include <weft/engine/rendezvous/scheme.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

Rendezvous join_multicast(const Url& url, const Wanted& wanted, const std::string& group_name,
                          Deadline deadline, Seeker& seeker) {
  Rendezvous result;
  result.world_size = require_world_size(wanted, at(url.host, *url.port));
  check_range(wanted.rank.value_or(0), result.world_size);
  const auto look = [&](const std::function<std::string()>& who_came) {
    seeker.look([&] {
      return "the others at " + at(url.host, *url.port) + "; so far there are " + who_came();
    });
  };
  MulticastMeeting meeting = meet_by_multicast(url.host, *url.port, group_name, wanted.rank,
                                               result.world_size, deadline, look);
  result.rank = meeting.rank;
  result.local_address = meeting.local_address;
  result.until_all_came = meeting.announcing;
  if (!meeting.hosts) {
    result.store = join_store({meeting.host, meeting.port}, result.rank, deadline, seeker);
    return result;
  }
  require_descriptors_to_host(result.world_size);
  result.hosts = true;
  auto options = server_options(meeting.port, deadline);
  options.multiTenant = false;
  options.masterListenFd = meeting.listener.release();  // the store closes it
  try {
    result.store = c10::make_intrusive<c10d::TCPStore>(meeting.host, options);
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, at(url.host, *url.port) +
                                   ": the store cannot be opened: " + tensor::text_of(error));
  }
  return result;
}

}  // namespace weft::group
