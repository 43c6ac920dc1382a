// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <random>

#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/rendezvous/lives.h>
#include <weft/engine/rendezvous/scheme.h>
#include <weft/engine/store/file_store.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// Identifies this process; also this thread, if threads are ranks without a number. Differs in a
// forked child.
std::string identity(bool of_thread) {
  const auto random = [] {
    return std::to_string(std::random_device()()) + std::to_string(std::random_device()());
  };
  static const std::string process = random();
  thread_local const std::string thread = random();
  return std::to_string(getpid()) + "-" + (of_thread ? thread : process);
}

// Claims one of the file's ranks, each of which can be claimed once. This also detects ranks that
// an earlier job left in the file.
int claim_rank(c10d::Store& store, std::optional<int> given, int world_size,
               const std::string& path) {
  const std::string remedy = "; or an earlier job that was killed left the file: remove it";
  const auto is_free = [&](int rank) {
    return store.add("weft/claims/" + std::to_string(rank), 1) == 1;
  };
  if (given) {
    if (is_free(*given)) return *given;
    throw Error(Blame::Caller,
                "file://" + path + ": rank " + std::to_string(*given) + " came twice" + remedy);
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (is_free(rank)) return rank;
  }
  throw Error(Blame::Caller, "file://" + path + ": more processes came than the world size " +
                                 std::to_string(world_size) + remedy);
}

}  // namespace

Rendezvous join_file(const Url& url, const Wanted& wanted, const std::string& group_name,
                     Deadline deadline, bool open) {
  const std::string path = url.host + url.path;
  if (path.empty()) throw Error(Blame::Caller, "file:// needs a path: file:///tmp/job");
  Rendezvous result;
  result.world_size = require_world_size(wanted, "file://" + path);
  check_range(wanted.rank.value_or(0), result.world_size);
  // c10d would wait for minutes for the folder to appear.
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw system_error(Blame::Caller,
                       "file://" + path + ": the folder " + folder + " cannot be written to",
                       errno);
  }
  try {
    result.store = open_job_file(path, result.world_size);
    result.store->setTimeout(limit_for_c10d(deadline));
    result.store = under_name(result.store, group_name);
    const bool numbered = wanted.rank.has_value();
    if (open) {
      result.rank = wanted.rank.value_or(kAnyRank);  // the members settle which rank it gets
    } else {
      const std::string who =
          identity(!numbered) + (numbered ? "-" + std::to_string(*wanted.rank) : "");
      result.store = next_life(result.store, who).store;
      result.rank = claim_rank(*result.store, wanted.rank, result.world_size, path);
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, "file://" + path + " cannot be used: " + tensor::text_of(error));
  }
  return result;
}

}  // namespace weft::group
