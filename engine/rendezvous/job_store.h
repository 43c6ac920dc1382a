// SPDX-License-Identifier: Apache-2.0
// Hosts the TCP store of a job, or joins the one that rank 0 hosts.
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/deadline.h>
#include <weft/engine/rendezvous/scheme.h>

namespace weft::group {

// c10d's options for the store that this process hosts. They do not wait for all ranks: c10d would
// poll every 10 ms; instead the group waits for them, and knows which are missing.
c10d::TCPStoreOptions server_options(int port, Deadline deadline);
// Opens a store that this process hosts.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& host,
                                              c10d::TCPStoreOptions options);
// Throws Busy beforehand if this process may run out of descriptors. c10d does not report that
// limit, or retries until its time is over; and a host that cannot accept a rank's connection
// cannot tell that rank why.
void require_descriptors_to_host(int world_size);
// If `shared`, another job's store at this address serves too: the group's name keeps their keys
// apart.
c10::intrusive_ptr<c10d::Store> host_store(const TcpAddress& address, int world_size, bool shared,
                                           Deadline deadline, Seeker& seeker);

// Waits until a store answers at the address. Throws Timeout or PeerLost.
c10::intrusive_ptr<c10d::Store> join_store(const TcpAddress& address, int rank, Deadline deadline,
                                           Seeker& seeker);
// The same, until rank 0 has begun the same life (lives.h) there.
c10::intrusive_ptr<c10d::Store> join_store_of_this_life(const TcpAddress& address, int rank,
                                                        const std::string& group_name,
                                                        Deadline deadline, Seeker& seeker);

// Rank 0 tells the others which group it joins at the store that it hosts.
void tell_group_of_rank_zero(c10d::Store& store, const std::string& group_name);

}  // namespace weft::group
