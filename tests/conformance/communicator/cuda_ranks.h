// A rank's GPU, real or fake: memory that is written and read through pinned copies, and gates that
// streams wait at.
#pragma once

#include <weft/base/result.h>
#include <weft/cuda/device.h>
#include <weft/cuda/driver.h>
#include <weft/tests/conformance/communicator/ranks.h>

namespace weft::conformance {

// The machine's own, opened once for tests whose ranks or ends share a GPU. An error where there is
// none.
const Result<std::shared_ptr<const cuda::Driver>>& real_driver();

// Device memory of stream-ordered pools, which stays in the process, or such that others may open.
enum class OnDevice { Pooled, Shareable };

// Gives the rank memory and gates on the device, and what they need.
void equip(Rank& rank, const std::shared_ptr<cuda::Device>& device,
           OnDevice kind = OnDevice::Pooled);

// Frees what the rank has left on the device; fails the test if something still holds on to it.
void reclaim(std::shared_ptr<cuda::Device> device);

}  // namespace weft::conformance
