// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include <weft/transport/mpi/mpi_communicator.h>
#include <weft/transport/registry.h>

namespace weft::transport::mpi {

namespace {

class Mpi final : public Transport {
 public:
  explicit Mpi(std::shared_ptr<const Library> library) : library_(std::move(library)) {}

  std::string_view name() const override { return "mpi"; }
  // Device memory is staged through pinned memory (transport/staged/staged_communicator.h). MPI
  // knows no streams, so the host would have to wait for it in any case.
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }
  std::shared_ptr<Communicator> join(const JoinOptions& options) override {
    if (!options.device.is_host()) {
      throw Error(Blame::Unsupported,
                  "joining " + place_of(options, name()) + ": mpi does not carry memory of " +
                      weft::describe(options.device) + "; " + library_->why_no_device_memory());
    }
    return std::make_shared<MpiCommunicator>(options, World::of_process(library_));
  }

 private:
  const std::shared_ptr<const Library> library_;
};

}  // namespace

Result<std::shared_ptr<Transport>> open() {
  auto library = Library::open();
  if (!library) return library.error();
  if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) {
    return Error(Blame::Unsupported,
                 "this process was not started by Open MPI (no OMPI_COMM_WORLD_SIZE); use mpirun "
                 "-n RANKS PROGRAM");
  }
  return std::shared_ptr<Transport>(std::make_shared<Mpi>(std::move(library).value()));
}

}  // namespace weft::transport::mpi
