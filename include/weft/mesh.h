// SPDX-License-Identifier: Apache-2.0
// Mesh, MeshAxis: the ranks of a group as a grid with named axes.
#pragma once

#include <weft/engine/mesh/mesh.h>
#include <weft/error.h>
#include <weft/group.h>
