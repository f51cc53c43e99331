package ycsb

import "unsafe"

// entriesOf returns the table of versions that lies in m, which is aligned to a page.
func entriesOf(m []byte) []entry {
	return unsafe.Slice((*entry)(unsafe.Pointer(unsafe.SliceData(m))), len(m)/entryBytes)
}
