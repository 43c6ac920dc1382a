// SPDX-License-Identifier: Apache-2.0
// The torch wheel ships Gloo's code inside libtorch_cpu but not its headers. These six files
// declare only the names that c10d/ProcessGroupGloo.hpp uses: opaque types, and the interfaces that
// it derives from or calls. They have no data members; Weft's own files do not construct, lay out
// or derive from any Gloo type.
#pragma once
