//go:build spdk && cgo && !spdkstandin

package spdk

// #cgo pkg-config: jbofd-spdk
import "C"
