// SPDX-License-Identifier: Apache-2.0
// MPI in this process: started once, and ended at the end of the process. MPI itself demands that,
// so there is one World for each process.
//
// Usable from every thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <weft/base/dtype.h>
#include <weft/base/mutex.h>
#include <weft/base/slice.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/mpi/library.h>

namespace weft::transport::mpi {

class World {
  struct Key {};  // only of_process() can make one

 public:
  // The first call starts MPI and blocks until all ranks of the job have started it; if the program
  // has already started MPI, uses that. Throws Unsupported if MPI has been finalized, or was
  // started for a single thread only.
  static std::shared_ptr<World> of_process(const std::shared_ptr<const Library>& library);
  World(Key, std::shared_ptr<const Library> library);
  // Runs at the end of the process: ends MPI if Weft started it. Blocks until the other ranks do
  // the same; mpirun ends the job if one has died.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const Library& library() const { return *library_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int largest_tag() const { return largest_tag_; }

  // Must be held around every MPI call: a lock if MPI takes one thread at a time
  // (MPI_THREAD_SERIALIZED), else an empty one.
  std::unique_lock<std::mutex> turn();

  // MPI's type for elements of this many bytes, and its operator to combine them. Must be called
  // inside turn().
  MPI_Datatype elements(std::size_t bytes);
  MPI_Op operation(Dtype dtype, ReduceOp op);

  // Returns a tag for creating a communicator. Communicators that are created at the same time and
  // share ranks need different tags.
  int next_creation_tag();
  // Keeps memory that MPI may use until it ends, because operations that Weft gives up cannot be
  // withdrawn.
  void keep_for_ever(Pin pin);

 private:
  std::shared_ptr<const Library> library_;
  bool ours_ = false;
  bool one_thread_at_a_time_ = false;
  int rank_ = 0;
  int size_ = 1;
  int largest_tag_ = 32767;
  std::mutex turns_;
  Mutex mutex_;
  std::map<std::size_t, MPI_Datatype> elements_ WEFT_GUARDED_BY(mutex_);
  std::map<std::pair<Dtype, ReduceOp>, MPI_Op> operations_ WEFT_GUARDED_BY(mutex_);
  int created_ WEFT_GUARDED_BY(mutex_) = 0;
  std::vector<Pin> kept_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::mpi
