// SPDX-License-Identifier: Apache-2.0
// Every function of libibverbs that Weft uses, in one table that dlopen fills, so that a program
// built with verbs starts on a machine without libibverbs. The functions that post work and poll
// completions are inline in verbs.h and call through the device's own table, so they need no entry
// here.
//
// A Library is immutable and usable from every thread.
#pragma once

#include <memory>
#include <string>

#include <infiniband/verbs.h>

#include <weft/base/error.h>
#include <weft/base/result.h>

namespace weft::transport::verbs {

// function(member, symbol). Some symbols are also function-like macros; without arguments they
// remain names.
// clang-format off
#define WEFT_VERBS_FUNCTIONS(function)                     \
  function(get_device_list, ibv_get_device_list)           \
  function(free_device_list, ibv_free_device_list)         \
  function(get_device_name, ibv_get_device_name)           \
  function(open_device, ibv_open_device)                   \
  function(close_device, ibv_close_device)                 \
  function(query_device, ibv_query_device)                 \
  function(query_port, ibv_query_port)                     \
  function(query_gid_table, _ibv_query_gid_table)          \
  function(alloc_pd, ibv_alloc_pd)                         \
  function(dealloc_pd, ibv_dealloc_pd)                     \
  function(reg_mr, ibv_reg_mr)                             \
  function(dereg_mr, ibv_dereg_mr)                         \
  function(create_comp_channel, ibv_create_comp_channel)   \
  function(destroy_comp_channel, ibv_destroy_comp_channel) \
  function(create_cq, ibv_create_cq)                       \
  function(destroy_cq, ibv_destroy_cq)                     \
  function(get_cq_event, ibv_get_cq_event)                 \
  function(ack_cq_events, ibv_ack_cq_events)               \
  function(get_async_event, ibv_get_async_event)           \
  function(ack_async_event, ibv_ack_async_event)           \
  function(event_type_str, ibv_event_type_str)             \
  function(create_qp, ibv_create_qp)                       \
  function(destroy_qp, ibv_destroy_qp)                     \
  function(modify_qp, ibv_modify_qp)                       \
  function(port_state_str, ibv_port_state_str)             \
  function(wc_status_str, ibv_wc_status_str)
// clang-format on

struct Library {
#define WEFT_VERBS_MEMBER(member, symbol) decltype(&::symbol) member = nullptr;
  WEFT_VERBS_FUNCTIONS(WEFT_VERBS_MEMBER)
#undef WEFT_VERBS_MEMBER
  // Needs rdma-core 34; null if the library is older.
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr = nullptr;

  // Returns Unsupported, with the reason, if the library is missing or too old.
  static Result<std::shared_ptr<const Library>> open(const char* file = "libibverbs.so.1");
};

}  // namespace weft::transport::verbs
