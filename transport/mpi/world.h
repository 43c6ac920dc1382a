// MPI as this process has it: started once, ended when the process does. That is MPI's own rule,
// and the reason why this is the one thing of Weft that a process has one of.
//
// Usable from every thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/mpi/library.h>

namespace weft::transport::mpi {

class World {
  struct Key {};  // only of_process() makes one

 public:
  // Starts MPI at the first call, which blocks until all ranks of the job have; where the program
  // has started it already, uses it. Throws Unsupported where it has ended, or was started for a
  // single thread only.
  static std::shared_ptr<World> of_process(const std::shared_ptr<const Library>& library);
  World(Key, std::shared_ptr<const Library> library);
  // Ends MPI, if we started it: at the end of the process. Blocks until the other ranks do the
  // same; mpirun ends the job where one has died.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const Library& library() const { return *library_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int largest_tag() const { return largest_tag_; }

  // Held around every call of MPI: a lock where MPI takes one thread at a time
  // (MPI_THREAD_SERIALIZED), else nothing.
  std::unique_lock<std::mutex> turn();

  // How MPI sees elements of so many bytes, and how it combines them. Inside turn().
  MPI_Datatype elements(std::size_t bytes);
  MPI_Op operation(Dtype dtype, ReduceOp op);

  // Tags of communicators that are being made must differ where their ranks overlap.
  int next_creation_tag();
  // For what MPI may touch until it ends: operations that were given up cannot be withdrawn.
  void keep_for_ever(Pin pin);

 private:
  std::shared_ptr<const Library> library_;
  bool ours_ = false;
  bool one_thread_at_a_time_ = false;
  int rank_ = 0;
  int size_ = 1;
  int largest_tag_ = 32767;
  std::mutex turns_;
  std::map<std::size_t, MPI_Datatype> elements_;
  std::map<std::pair<Dtype, ReduceOp>, MPI_Op> operations_;
  std::mutex mutex_;  // of what follows
  int created_ = 0;
  std::vector<Pin> kept_;
};

}  // namespace weft::transport::mpi
